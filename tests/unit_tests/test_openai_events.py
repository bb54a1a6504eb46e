"""How streams of events are read, however their bytes arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specguard_adapters.openai.events import event_data

SEPARATORS = "\x85\u2028\u2029"
"""Where `str.splitlines` breaks, and which JSON may have within a text."""


def read(chunks: Sequence[bytes]) -> list[str]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[str]:
        return [data async for data in event_data(arriving())]

    return asyncio.run(collect())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_data_is_read(end: str) -> None:
    lines = [": a comment", "event: x", 'data: {"a": 1}', "", "data:", "data:[DONE]", "data: 2", ""]
    assert read([end.join(lines).encode()]) == [' {"a": 1}'], "the end is told"


def test_the_last_line_needs_no_end() -> None:
    assert read([b"data: 1\n\nda", b"ta: 2"]) == [" 1", " 2"]
    assert read([]) == []


@given(
    st.lists(st.text(f"aé😀{SEPARATORS}\n\r", max_size=8), max_size=4),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_texts_arrive_as_they_were_sent(texts: list[str], end: str, cuts: list[int]) -> None:
    """Lines end nowhere within JSON, and chunks may end within characters and line ends."""
    sent = "".join(f"data: {json.dumps(t, ensure_ascii=False)}{end * 2}" for t in texts).encode()
    places = [0, *sorted(min(place, len(sent)) for place in cuts), len(sent)]
    chunks = [sent[start:stop] for start, stop in pairwise(places)]
    assert [json.loads(data) for data in read(chunks)] == texts
