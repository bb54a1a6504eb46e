"""Server-sent events: a stream's bytes to the data that its events carry."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress

LINE_END = re.compile(rb"\r\n|\r|\n")
"""What ends a line of such a stream. httpx's own lines end at U+2028 and its like too, which
servers may send as they are within JSON [run, httpx 0.28.1]."""


DRAIN_S = 1.0
"""Longest time from the last event to the end of the body."""


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of each event, which is one line, up to the end of the stream.

    The end is that of the body and not "[DONE]": only then the connection can be used again. It is
    not waited for long.
    """
    async for line in _lines(chunks):
        field, _, value = line.partition(":")
        if field != "data" or not value.strip():
            continue
        if value.strip() != "[DONE]":
            yield value
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                async for _ in chunks:
                    pass
        return


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for chunk in chunks:
        # An empty line more, where a chunk ends between the two of a line's end, does no harm.
        *lines, rest = LINE_END.split(rest + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
