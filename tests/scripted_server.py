"""An OpenAI-compatible server on 127.0.0.1 whose model is a function, and which fails on demand.

Its tokens are bytes. It speaks like vLLM (token ids) or like llama-cpp-python (text only), as far
as the engine for servers uses them; each feature can be left out, and each request can go wrong.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

import numpy as np

END = 256
SPECIAL = 257
SPELLED = "<|im_end|>"
"""How the special token is spelled."""
TOOL = 258
TAG = "<tool>"
"""A token of its own, which is text all the same."""
NAMED = {SPECIAL: SPELLED, TOOL: TAG}
LENGTH = 128
UNFINISHED = "\ufffd"

Policy = Callable[[Sequence[int], int], int]
"""(tokens so far, seed; 0 is greedy) -> next token."""


def letters(tokens: Sequence[int], seed: int) -> int:
    """Any letter may follow, decided by all tokens so far; an answer to "!" ends after ten."""
    if tokens[0] == ord("!") and len(tokens) > 12:
        return END
    rng = np.random.default_rng([seed, crc32(repr(list(tokens)).encode())])
    return int(rng.choice(list(b"abcdefgh ")))


def scripts(*texts: str) -> Policy:
    """Seed i writes the i-th text after the last "A:", and then ends."""

    def policy(tokens: Sequence[int], seed: int) -> int:
        _, asked, answer = bytes(t for t in tokens if t < END).rpartition(b"A:")
        if not asked:
            return letters(tokens, seed)
        written = len(answer)
        script = texts[seed % len(texts)].encode()
        return script[written] if written < len(script) else END

    return policy


def logprob(tokens: Sequence[int], token: int) -> float:
    """Every token has a log-prob of its own in every context."""
    return -0.1 - (crc32(repr([*tokens, token]).encode()) % 4000) / 1000


@dataclass(slots=True)
class Fault:
    """What goes wrong with one request."""

    kind: str
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"error": {"message": "something broke", "type": "x", "code": 500}}'


@dataclass
class ScriptedServer:
    """What the server does; change it at any time."""

    policy: Policy = letters
    dialect: str = "vllm"
    models: Sequence[str] = ("toy",)
    lacks: set[str] = field(default_factory=set)
    """Of: models, tokenize, length, logprobs, raw_logprobs, token_ids, n, stops, scoring, rows (the
    right ones are read for scores), chat_template, system (messages), neutral, stream."""
    adds_space: bool = False
    """Texts are tokenized with a space before them."""
    key: str | None = None
    lingers: bool = False
    """Keep the body of a stream open after its last event."""
    token_s: float = 0.0
    """Pause before each streamed token."""
    faults: list[Fault] = field(default_factory=list)
    """For the next completions, in this order."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    """Whence requests came."""
    streamed: int = 0
    """Tokens that have been sent as events."""
    aborted: threading.Event = field(default_factory=threading.Event)
    """Set once a client has closed its connection before the answer was complete."""
    url: str = ""

    def bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        """Return what was sent to a path."""
        return [body for at, body in self.requests if at == path]


@contextmanager
def serve(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Run a server."""

    class Handler(_Handler):
        script = server

    http = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    script: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self._answer(json.loads(self.rfile.read(length)))

    def _answer(self, body: dict[str, Any]) -> None:
        script = self.script
        script.requests.append((self.path, body))
        script.connections.add(self.client_address)
        if script.key is not None and self.headers["Authorization"] != f"Bearer {script.key}":
            self._refuse(401, f"wrong key {self.headers['Authorization']}")
            return
        route = {
            "/v1/models": self._models,
            "/v1/completions": self._completions,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/extras/tokenize": self._tokenize,
        }.get(self.path)
        foreign = (self.path == "/extras/tokenize") == (script.dialect == "vllm")
        if route is None or (foreign and "tokenize" in self.path):
            self._refuse(404, "Not Found")
            return
        try:
            route(body)
        except (BrokenPipeError, ConnectionResetError):
            script.aborted.set()
            self.close_connection = True

    # --- endpoints

    def _models(self, body: dict[str, Any]) -> None:
        if "models" in self.script.lacks:
            self._refuse(404, "Not Found")
            return
        length = {} if "length" in self.script.lacks else {"max_model_len": LENGTH}
        self._json({"data": [{"id": model, **length} for model in self.script.models]})

    def _tokenize(self, body: dict[str, Any]) -> None:
        lacks = self.script.lacks
        if "tokenize" in lacks or ("messages" in body and "chat_template" in lacks):
            self._refuse(404, "Not Found")
            return
        text = body.get("prompt", body.get("input", ""))
        if "messages" in body:
            if refusal := _wrong(body["messages"], lacks):
                self._refuse(400, refusal)
                return
            text = "".join(f"{m['role']}:{m['content']}{SPELLED}" for m in body["messages"]) + "A:"
        if self.script.adds_space and text:
            text = f" {text}"
        tokens = encode(text)
        spelled = [spell(token).replace(" ", "\u2581") for token in tokens]
        self._json({"tokens": tokens, "token_strs": spelled})

    def _detokenize(self, body: dict[str, Any]) -> None:
        self._json({"prompt": decode(body["tokens"])})

    def _completions(self, body: dict[str, Any]) -> None:
        script = self.script
        if script.faults and self._fail(script.faults.pop(0), body):
            return
        if refusal := self._refusal(body):
            self._refuse(*refusal)
            return
        ids = script.dialect == "vllm" and "token_ids" not in script.lacks
        prompt = encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        one = script.dialect != "vllm" or "n" in script.lacks
        candidates = [
            _Candidate(script, body, prompt, i, ids=ids)
            for i in range(1 if one else body.get("n", 1))
        ]
        if body.get("stream"):
            self._stream(candidates)
            return
        written = sum(len(candidate.tokens) for candidate in candidates)
        choices = [candidate.whole() for candidate in candidates]
        self._json({"choices": choices, "usage": {"completion_tokens": written}})

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        script = self.script
        if body["model"] not in script.models:
            return 404, f"The model `{body['model']}` does not exist."
        if "logprobs" in script.lacks and "logprobs" in body:
            return 500, "logprobs is not supported"
        if "neutral" in script.lacks and body.keys() & {"top_k", "min_p", "repetition_penalty"}:
            return 400, "unknown parameter top_k"
        if "stream" in script.lacks and body.get("stream"):
            return 400, "no streams here"
        if script.dialect != "vllm" and not isinstance(body["prompt"], str):
            return 500, "the prompt is not a string"
        if script.dialect == "vllm" and body.get("n", 1) > 1 and body["temperature"] == 0:
            return 400, "n must be 1 when using greedy sampling"
        return None

    # --- answers

    def _stream(self, candidates: Sequence[_Candidate]) -> None:
        self._start_stream()
        for step in range(max(len(candidate.tokens) for candidate in candidates) + 1):
            for candidate in candidates:
                if (choice := candidate.event(step)) is not None:
                    time.sleep(self.script.token_s)
                    self._event({"choices": [choice]})
                    self.script.streamed += 1
        self._chunk(b"data: [DONE]\n\n")
        if self.script.lingers:
            self._wait()
        self._chunk(b"")

    def _start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b": a comment\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        escaped = self.script.dialect != "vllm"  # which escapes only what JSON demands
        self._chunk(f"data: {json.dumps(event, ensure_ascii=escaped)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value), {"Content-Type": "application/json"})

    def _refuse(self, status: int, message: str) -> None:
        error = {"error": {"message": message, "type": "x", "code": status}}
        self._send(status, json.dumps(error), {"Content-Type": "application/json"})

    def _send(self, status: int, body: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def _fail(self, fault: Fault, body: dict[str, Any]) -> bool:
        """Go wrong; return whether the request is done with."""
        choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [97]}
        choice["logprobs"] = {"tokens": ["a"], "token_logprobs": [-1.0]}
        match fault.kind:
            case "status":
                self._send(fault.status, fault.body, fault.headers)
            case "body":
                self._send(200, fault.body, {"Content-Type": "application/json", **fault.headers})
            case "cut":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            case "cut stream":
                self._start_stream()
                self._event({"choices": [choice]})
                self.close_connection = True
            case "short stream":
                self._start_stream()
                self._event({"choices": [choice]})
                self._chunk(b"")
            case "stream error":
                self._start_stream()
                self._event({"choices": [choice]})
                self._event({"error": {"message": "out of memory", "code": fault.status}})
                self._chunk(b"")
            case "no logprobs":
                self._start_stream()
                self._event({"choices": [{**choice, "logprobs": None}]})
                self._chunk(b"")
            case "choice":
                self._start_stream()
                self._event({"choices": [{**choice, **json.loads(fault.body)}]})
                self._chunk(b"")
            case "drip":
                self._start_stream()
                while True:
                    self._chunk(b": still here\n\n")
                    time.sleep(0.02)
            case "hang":
                self._wait()
        return True

    def _wait(self) -> None:
        """Do nothing until the client closes the connection."""
        self.connection.settimeout(30)
        while self.rfile.read(1):
            pass
        raise BrokenPipeError


def _wrong(messages: Sequence[dict[str, Any]], lacks: set[str]) -> str | None:
    """Say what of some messages is no form of the API, or nothing that the template takes."""
    if "system" in lacks and any(message["role"] == "system" for message in messages):
        return "system messages are not supported"
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    texts = [text for call in calls for text in (call["id"], call["function"]["arguments"])]
    return None if all(isinstance(text, str) for text in texts) else "should be a valid string"


class _Candidate:
    """One candidate of a completion."""

    def __init__(
        self,
        script: ScriptedServer,
        body: dict[str, Any],
        prompt: Sequence[int],
        index: int,
        *,
        ids: bool,
    ) -> None:
        self.script, self.body, self.prompt, self.index, self.ids = script, body, prompt, index, ids
        self.tokens: list[int] = []
        self.finish, self.stop_reason = "length", None
        seed = 0 if body["temperature"] == 0 or body.get("top_k") == 1 else body["seed"] + index
        stops = [] if "stops" in script.lacks else body.get("stop") or []
        while len(self.tokens) < body["max_tokens"]:
            token = script.policy([*prompt, *self.tokens], seed)
            token = next(map(int, body.get("logit_bias", ())), token)
            if token == END and not ids:
                self.finish = "stop"
                break
            self.tokens.append(token)
            found = [stop for stop in stops if stop in decode(self.tokens)]
            if token == END or found:
                self.finish, self.stop_reason = "stop", found[0] if found else None
                break

    def whole(self) -> dict[str, Any]:
        texts = ["".join(self._delta(i) for i in range(len(self.tokens)))]
        if self.script.dialect != "vllm":
            texts = [bytes(self.tokens).decode(errors="ignore")]
        choice = self._choice(range(len(self.tokens)), texts[0])
        if self.body.get("echo") and "scoring" not in self.script.lacks:
            everything = [*self.prompt, *self.tokens]
            late = "rows" in self.script.lacks
            logprobs = [logprob(everything[: i + late], t) for i, t in enumerate(everything)]
            choice["logprobs"] = {"token_logprobs": [None, *logprobs[1:]]}
        if "prompt_logprobs" in self.body and "scoring" not in self.script.lacks:
            rows = [
                {str(token): {"logprob": logprob(self.prompt[:i], token)}}
                for i, token in enumerate(self.prompt)
            ]
            choice["prompt_logprobs"] = [None, *rows[1:]]
        return {**choice, "finish_reason": self.finish, "stop_reason": self.stop_reason}

    def event(self, step: int) -> dict[str, Any] | None:
        """Return what is streamed at a step; text servers finish with an event of its own."""
        last = len(self.tokens) - 1 if self.ids else len(self.tokens)
        if step > last:
            return None
        positions = range(step, min(step + 1, len(self.tokens)))
        choice = self._choice(positions, self._delta(step) if positions else "")
        ended = step == last
        choice["finish_reason"] = self.finish if ended else None
        choice["stop_reason"] = self.stop_reason if ended else None
        return choice

    def _choice(self, positions: range, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "text": text, "logprobs": None}
        if self.ids and self.body.get("return_token_ids"):
            choice["token_ids"] = [self.tokens[i] for i in positions]
            choice["prompt_token_ids"] = list(self.prompt)
        if self.body.get("logprobs") is not None and positions:
            logprobs = [self._logprob(i) for i in positions]
            spelled = [decode([self.tokens[i]]).replace(UNFINISHED, "") for i in positions]
            choice["logprobs"] = {"tokens": spelled, "token_logprobs": logprobs}
        return choice

    def _logprob(self, i: int) -> float:
        value = logprob([*self.prompt, *self.tokens[:i]], self.tokens[i])
        return value * self.body["temperature"] if "raw_logprobs" in self.script.lacks else value

    def _delta(self, i: int) -> str:
        """Return the text that a token adds; vLLM and llama-cpp-python have their quirks."""
        if self.tokens[i] in (END, SPECIAL):
            return ""
        if self.script.dialect != "vllm":  # each token by itself
            return bytes([self.tokens[i]]).decode(errors="ignore")
        texts = [decode([*self.prompt, *self.tokens[:n]]) for n in range(i + 2)]
        if texts[-1].endswith(UNFINISHED):
            return ""
        if all(text.endswith(UNFINISHED) for text in texts[:-1]):  # the prompt's text once more
            return texts[-1]
        return texts[-1][len(texts[-2].rstrip(UNFINISHED)) :]


def encode(text: str) -> list[int]:
    """Return bytes; tokens that have a name are read wherever it is spelled."""
    tokens: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, NAMED.values()))})", text):
        named = [token for token, name in NAMED.items() if name == part]
        tokens += named or part.encode()
    return tokens


def spell(token: int) -> str:
    return NAMED.get(token, chr(token))


def decode(tokens: Sequence[int]) -> str:
    """Return the tokens' text, the end token's none."""
    data = b"".join(
        NAMED[token].encode() if token in NAMED else bytes([token])
        for token in tokens
        if token != END
    )
    return data.decode(errors="replace")
