"""How steps are written, cut and read on servers: the conformance suite has the rest."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")

from specguard_adapters.openai import OpenAIEngine
from specguard_adapters.openai.completions import split
from specguard_adapters.openai.pieces import PieceCodec, cut
from specguard_adapters.openai.prompts import KEPT
from specguard_chains import ChatSpecGuard
from specguard_chains.decoding.boundaries import Boundary, Ending
from specguard_chains.decoding.engine import Candidate, Prompt, Session
from specguard_chains.decoding.sampling import Sampling
from specguard_chains.errors import ConfigurationError, ContextOverflowError, EngineError
from tests.conformance.suite import text_step
from tests.scripted_server import (
    END,
    LENGTH,
    SPECIAL,
    SPELLED,
    TAG,
    TOOL,
    ScriptedServer,
    scripts,
    serve,
)

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=0.8)
ASK = Prompt(text="Q: why? A:")
SEED = (5, 0)

Make = Callable[..., tuple[ScriptedServer, OpenAIEngine]]


@pytest.fixture
def make() -> Iterator[Make]:
    stack: list[Any] = []

    def make(*texts: str, text: bool = False, **script: Any) -> tuple[ScriptedServer, OpenAIEngine]:
        settings: dict[str, Any] = {"context_length": 100} if text else {}
        dialect = "llama_cpp_python" if text else "vllm"
        policy = {"policy": scripts(*texts)} if texts else {}
        context = serve(ScriptedServer(dialect=dialect, **policy, **script))
        server = context.__enter__()
        stack.append(context)
        engine = OpenAIEngine("toy", base_url=server.url, **settings)
        server.requests.clear()
        stack.append(engine)
        return server, engine

    yield make
    for item in reversed(stack):
        item.close() if isinstance(item, OpenAIEngine) else item.__exit__(None, None, None)


def step(session: Session, tokens: int = 50, sampling: Sampling = GREEDY, **more: Any) -> Candidate:
    boundary = Boundary(max_tokens=tokens, **more)
    (candidate,) = session.sample(1, boundary, sampling, seed=SEED)
    return candidate


both = pytest.mark.parametrize("text", [False, True], ids=["ids", "text"])


def test_line_separators_within_a_text_stay_there(make: Make) -> None:
    """Servers may send them as they are, and httpx takes them for ends of lines."""
    written = "one\u2028two\x85three\u2029four"
    _, engine = make(written)
    assert step(engine.open(ASK)).text == written


@both
def test_an_answer_is_written_step_by_step(make: Make, text: bool) -> None:
    _, engine = make("One.\n\nTwo.", text=text)
    session = engine.open(ASK)
    written = []
    while not written or not written[-1].ends_sequence:
        written.append(step(session))
        session.accept(written[-1])
    assert [(s.text, s.ending) for s in written] == [
        ("One.\n\n", Ending.BOUNDARY),
        ("Two.", Ending.END_OF_SEQUENCE),
    ]
    assert (written[-1].tokens[-1] == END) == (not text), "where tokens have ids, it has one"
    assert session.length == len("Q: why? A:One.\n\nTwo.") + (not text)


@both
def test_blank_text_is_no_step(make: Make, text: bool) -> None:
    server, engine = make("\n\n \n\nOne.\n\nTwo.", text=text)
    written = step(engine.open(ASK))
    assert (written.text, written.ending) == ("\n\n \n\nOne.\n\n", Ending.BOUNDARY)
    assert len(server.bodies()) == (1 if text else 3), "the server has stopped at blank lines"


def test_the_server_is_told_where_to_stop(make: Make) -> None:
    server, engine = make("One.\n\nTwo.")
    step(engine.open(ASK), stop=("#",))
    (body,) = server.bodies()
    assert body["stop"] == ["\n\n", "#"]
    assert body["include_stop_str_in_output"] is True
    assert body["max_tokens"] == 50


def test_what_shapes_the_distribution_is_sent(make: Make) -> None:
    server, engine = make("x")
    session = engine.open(ASK)
    step(session, sampling=GREEDY)
    step(session, sampling=Sampling(0.7, 0.9, 20, 0.1))
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert [[body[key] for key in keys] for body in server.bodies()] == [
        [0, 1, -1, 0, 1],
        [0.7, 0.9, 20, 0.1, 1],
    ]


def test_settings_that_a_server_does_not_take_are_refused(make: Make) -> None:
    server, engine = make("x", lacks={"neutral"})
    session = engine.open(ASK)
    assert step(session, sampling=Sampling(0.7, 0.9)).text == "x"
    assert not server.bodies()[-1].keys() & {"top_k", "min_p"}
    with pytest.raises(ConfigurationError, match="top_k=20"):
        step(session, sampling=Sampling(top_k=20))


def test_candidates_come_in_one_request(make: Make) -> None:
    server, engine = make("One", "Two", "Three")
    session = engine.open(ASK)
    candidates = session.sample(3, Boundary(max_tokens=50), WARM, seed=SEED)
    assert len(server.bodies()) == 1
    assert len({candidate.text for candidate in candidates}) == 3
    server.requests.clear()
    assert len(session.sample(3, Boundary(max_tokens=50), GREEDY, seed=SEED)) == 3
    assert [body.get("n", 1) for body in server.bodies()] == [1]


def test_more_candidates_than_declared_are_refused(make: Make) -> None:
    _, engine = make("One")
    with pytest.raises(ConfigurationError, match="max_candidates=16"):
        engine.open(ASK).sample(17, Boundary(max_tokens=50), WARM, seed=SEED)


def test_candidates_come_one_by_one_where_they_must(make: Make) -> None:
    server, engine = make("One", "Two", "Three", text=True)
    candidates = engine.open(ASK).sample(3, Boundary(max_tokens=50), WARM, seed=SEED)
    assert len({candidate.text for candidate in candidates}) == 3
    assert len({body["seed"] for body in server.bodies()}) == 3


def test_a_denied_candidate_is_completed_if_another_is_not(make: Make) -> None:
    server, engine = make("One", "Two", "Six", text=True)
    session = engine.open(ASK)
    wholes = session.sample(3, Boundary(max_tokens=50), WARM, seed=SEED)
    denied = [float(whole.reading.logprobs[0]) for whole in wholes]

    def sample(accepted: int | None) -> list[Candidate]:
        def watch(confidence: float, _: float | None) -> bool:
            return accepted is not None and confidence <= denied[accepted]

        lowest = min(range(3), key=denied.__getitem__)
        assert accepted in (None, lowest), "the others have better tokens than this one's first"
        server.requests.clear()
        return session.sample(3, Boundary(max_tokens=50), WARM, seed=SEED, watch=watch)

    again = sample(accepted=denied.index(min(denied)))
    assert [c.text for c in again] == [c.text for c in wholes]
    assert {c.ending for c in again} == {Ending.END_OF_SEQUENCE}
    early = sample(accepted=None)
    assert [c.ending for c in early] == [Ending.REJECTED_EARLY] * 3
    assert [len(c.tokens) for c in early] == [1, 1, 1]
    assert len(server.bodies()) == 3


def test_a_step_may_end_within_a_token(make: Make) -> None:
    """Servers cut the text after the stop string; the token has more of it."""
    assert split("a\n\n", ["a", "\n\n\n"]) == ["a", "\n\n"]
    _, engine = make("x")
    choice = {"index": 0, "text": ".\n\n", "finish_reason": "stop", "stop_reason": "\n\n"}
    choice |= {"token_ids": [7], "logprobs": {"tokens": [".\n\n\n"], "token_logprobs": [-1.0]}}
    event = engine._server.completions._event(choice)
    assert [token.text for token in event.tokens] == [".\n\n\n"]


@pytest.mark.parametrize(
    ("text", "texts", "pieces"),
    [
        ("ab", ["ab"], ["ab"]),
        ("abc", ["a", "b", "c"], ["a", "b", "c"]),
        ("🦊 é", ["", "", " ", "", ""], ["", "🦊", " ", "", "é"]),
        (" 🦊a", [" ", "", "a"], [" ", "🦊", "a"]),
        ("🦊", ["", ""], ["", "🦊"]),
        ("", ["", ""], ["", ""]),
        ("", [], []),
    ],
)
def test_text_is_divided_among_its_tokens(text: str, texts: list[str], pieces: list[str]) -> None:
    assert split(text, texts) == pieces


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_a_step_that_ends_within_a_character_loses_nothing(make: Make, tokens: int) -> None:
    answer = "né 🦊 你好"
    _, engine = make(answer)
    session = engine.open(ASK)
    written = ""
    while True:
        candidate = step(session, tokens)
        written += candidate.text
        session.accept(candidate)
        if candidate.ends_sequence:
            break
    assert written == answer
    assert session.length == len("Q: why? A:") + len(answer.encode()) + 1


def test_a_character_over_several_tokens_survives_a_text_stream(make: Make) -> None:
    answer = "né 🦊 你好.\n\nok"
    server, engine = make(answer, text=True)
    session = engine.open(ASK)
    first = step(session)
    assert (first.text, first.ending) == ("né 🦊 你好.\n\n", Ending.BOUNDARY)
    assert len(server.bodies()) == 2, "once streamed, once whole"
    session.accept(first)
    server.requests.clear()
    assert step(session).text == "ok"
    assert len(server.bodies()) == 1


def test_special_tokens_in_a_foreign_step_stay_text(make: Make) -> None:
    server, engine = make("x")
    session = engine.open(ASK)
    session.accept(text_step(f"so {SPELLED} and {SPELLED}{SPELLED}."))
    step(session)
    prompt = server.bodies()[-1]["prompt"]
    assert SPECIAL not in prompt
    assert bytes(prompt).decode().endswith(f"so {SPELLED} and {SPELLED}{SPELLED}.")


def test_special_tokens_in_messages_stay_text(make: Make) -> None:
    _, engine = make("x")
    plain = engine.encode(Prompt(messages=[{"role": "user", "content": "Hi"}]))
    assert plain.count(SPECIAL) == 1, "the template's own"
    tricky = engine.encode(Prompt(messages=[{"role": "user", "content": f"Hi{SPELLED}bye [x]"}]))
    assert tricky.count(SPECIAL) == 1
    assert engine.text(tricky) == f"user:Hi{SPELLED}bye [x]{SPELLED}A:"


def test_no_space_comes_before_a_foreign_step(make: Make) -> None:
    server, engine = make("x", adds_space=True)
    session = engine.open(ASK)
    session.accept(text_step(f"so{SPELLED} it"))
    session.accept(text_step(" is"))
    step(session)
    prompt = server.bodies()[-1]["prompt"]
    assert bytes(prompt).decode() == f" Q: why? A:so{SPELLED} it is"


def test_names_that_are_text_stay_tokens(make: Make) -> None:
    _, engine = make("x")
    session = engine.open(ASK)
    session.accept(text_step(f"so {TAG}."))
    assert session.length == len("Q: why? A:so ") + 2
    asked = engine.encode(Prompt(messages=[{"role": "user", "content": f"Hi {TAG}"}]))
    assert TOOL in asked


def test_a_local_template_takes_the_servers_place(make: Make) -> None:
    server, _ = make("x")
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}<|im_end|>A:"
    engine = OpenAIEngine("toy", base_url=server.url, chat_template=template)
    tokens = engine.encode(Prompt(messages=[{"role": "user", "content": f"Hi{SPELLED}"}]))
    assert engine.text(tokens) == f"[Hi{SPELLED}]{SPELLED}A:"
    assert tokens.count(SPECIAL) == 1
    engine.close()


@both
def test_a_whole_step_is_read_in_one_request(make: Make, text: bool) -> None:
    server, engine = make("One.\n\nTwo.", text=text)
    session = engine.open(ASK)
    own = step(session)
    server.requests.clear()
    reading = session.read(text_step(own.text))
    assert reading.logprobs == pytest.approx(own.reading.logprobs, abs=1e-6)
    assert len(server.bodies()) == 1


def test_without_scoring_reading_is_refused(make: Make) -> None:
    _, engine = make("One", lacks={"scoring"})
    assert not engine.capabilities.scoring
    session = engine.open(ASK)
    with pytest.raises(ConfigurationError, match="verify_with='draft'"):
        session.read(step(session))


def test_without_logprobs_readings_are_empty(make: Make) -> None:
    for text in (False, True):
        _, engine = make("One.\n\nTwo", lacks={"logprobs"}, text=text)
        assert not engine.capabilities.logprobs
        candidates = engine.open(ASK).sample(
            2, Boundary(max_tokens=50), WARM, seed=SEED, watch=lambda *_: False
        )
        assert [c.reading.logprobs.size for c in candidates] == [0, 0]
        assert {c.text for c in candidates} == {"One.\n\n"}


def test_text_cannot_be_cut_where_it_is_not_known(make: Make) -> None:
    _, engine = make("One", text=True)
    session = engine.open(ASK)
    length = session.length
    session.accept(text_step(" and so"))
    with pytest.raises(EngineError, match="gives no token ids"):
        session.rollback(length + 2)
    session.rollback(length)
    assert session.length == length
    with pytest.raises(ValueError, match="roll back"):
        session.rollback(length - 1)


@pytest.mark.parametrize("count", [-1, 1, 2, 7, 30])
@pytest.mark.parametrize("text", ["a", "né 🦊 你好\ud800", "\0\0"])
def test_a_text_is_cut_into_as_many_pieces_as_it_has_tokens(
    make: Make, text: str, count: int
) -> None:
    _, engine = make("x", text=True)
    pieces = cut(text, count)
    assert len(pieces) == max(count, 1)
    assert engine.text(pieces) == text
    ends = [engine._server.codec.can_end([1, *pieces], length) for length in range(len(pieces) + 2)]
    assert ends == [True, True, *[False] * (len(pieces) - 1), True]


def test_nothing_is_kept_of_texts(make: Make) -> None:
    """Pieces of text are numbered without a table, which would grow with every request."""
    _, engine = make("One.\n\nTwo", text=True)
    codec = engine._server.codec
    prompts = ["".join(map(chr, range(1000 * i, 1000 * i + 10_000))) for i in range(1, 41)]
    assert isinstance(codec, PieceCodec)
    codec._count = lambda text, _: len(text) // 3  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for prompt in prompts:
            tokens = codec.encode(Prompt(text=prompt))
            assert codec.text([*tokens, *codec.encode_text(prompt, tokens)]) == prompt * 2
            del tokens
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000


@both
def test_two_engines_of_one_model_exchange_tokens(make: Make, text: bool) -> None:
    server, one = make("One.\n\nTwo", text=text)
    other = OpenAIEngine("toy", base_url=server.url, context_length=100)
    assert one.vocabulary == other.vocabulary
    candidate = step(one.open(ASK))
    session = other.open(ASK)
    session.accept(candidate)
    assert step(session).text == "Two"
    other.close()


def tokenized(server: ScriptedServer) -> int:
    return sum("tokenize" in path for path, _ in server.requests)


@both
def test_a_prompt_that_is_counted_and_opened_is_tokenized_once(make: Make, text: bool) -> None:
    server, engine = make("One", text=text)
    for number, prompt in enumerate([ASK, Prompt(text="Why? A:")], 1):
        tokens = engine.encode(prompt)
        assert engine.open(prompt).length == engine.open(prompt).length == len(tokens)
        tokens.clear()
        assert engine.encode(prompt)
        assert tokenized(server) == number


def test_one_answer_tokenizes_its_prompt_once(make: Make) -> None:
    server, engine = make("One.\n\nTwo")
    options: dict[str, Any] = {"decoder": "target", "target": engine, "seed": 1}
    answer = ChatSpecGuard(**options).invoke("why?")
    assert answer.text == "One.\n\nTwo"
    assert answer.usage_metadata is not None
    assert tokenized(server) == 1


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("call_id", ["call_1", None])
def test_calls_are_sent_as_the_api_has_them(make: Make, call_id: str | None) -> None:
    """Local templates get arguments as objects; servers check that they are JSON text."""
    server, engine = make("One")
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call_id}]},
        {"role": "tool", "content": "2", "tool_call_id": call_id},
    ]
    assert engine.encode(Prompt(messages=messages, tools=[{"type": "function"}]))
    (sent,) = [body for body in server.bodies("/tokenize") if "messages" in body]
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]
    assert sent["messages"][2]["name"] == "add"


def test_what_a_servers_template_refuses_is_sent_in_another_form(make: Make) -> None:
    server, engine = make("One", lacks={"system"})
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert bytes(t for t in engine.encode(Prompt(messages=messages)) if t < END) == (
        b"user:Be kind.\n\nHiA:"
    )
    assert tokenized(server) == 2


def test_special_tokens_in_tools_are_text(make: Make) -> None:
    _, engine = make("One")
    template = "{{ tools | tojson }}<|im_end|>A:"
    shielded = OpenAIEngine("toy", base_url=engine.base_url, chat_template=template)
    try:
        tools = [{"type": "function", "function": {"description": f"end{SPELLED}system"}}]
        tokens = shielded.encode(Prompt(messages=[{"role": "user", "content": "Hi"}], tools=tools))
    finally:
        shielded.close()
    assert tokens.count(SPECIAL) == 1, "the template's own"
    assert SPELLED.encode() in bytes(t for t in tokens if t < END)


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}


def test_what_a_server_cannot_be_held_to_is_refused_or_told_of(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine = make("Four")
    model = ChatSpecGuard(decoder="target", target=engine, seed=1, tool_instruction="")
    with pytest.raises(ConfigurationError, match="cannot be held to a schema, as strict=True asks"):
        model.bind_tools([ADD], strict=True).invoke("2 + 2?")
    assert not caplog.records
    assert model.bind_tools([ADD], parallel_tool_calls=False).invoke("2 + 2?").text == "Four"
    assert "calls and JSON are read as they come" in caplog.text


def test_a_server_may_think(make: Make) -> None:
    """Nothing tells of its template, and marks of reasoning are none of an answer."""
    _, engine = make("<think>Hm.</think>\n\nFour")
    message = ChatSpecGuard(decoder="target", target=engine, seed=1).invoke("2 + 2?")
    assert message.text == "Four"
    assert message.additional_kwargs["reasoning_content"] == "Hm."


def test_messages_that_have_changed_are_tokenized_anew(make: Make) -> None:
    server, engine = make("One")
    messages = [{"role": "user", "content": "Hi"}]
    before = engine.encode(Prompt(messages=messages))
    messages[0]["content"] = "Hello"
    assert engine.encode(Prompt(messages=messages)) != before
    assert tokenized(server) == 2


def test_few_prompts_are_remembered(make: Make) -> None:
    server, engine = make("One")
    prompts = [Prompt(text=f"{i}") for i in range(KEPT + 1)]
    for prompt in [*prompts, *prompts[1:]]:
        engine.encode(prompt)
    assert tokenized(server) == len(prompts)
    engine.encode(prompts[0])
    assert tokenized(server) == len(prompts) + 1


def test_a_closed_engine_remembers_nothing(make: Make) -> None:
    _, engine = make("One")
    engine.encode(ASK)
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        engine.encode(ASK)


def test_the_context_is_the_servers_or_less(make: Make) -> None:
    server, engine = make("x")
    assert engine.context_length == LENGTH - 1
    session = engine.open(ASK)
    with pytest.raises(ContextOverflowError, match=r"raise n_ctx \(context_length of the engine\)"):
        step(session, tokens=LENGTH)
    with pytest.raises(ContextOverflowError, match=r"raise n_ctx \(context_length of the engine\)"):
        engine.open(Prompt(text="a" * LENGTH))
    with pytest.raises(ConfigurationError, match=rf"has a context of {LENGTH} tokens.*n_ctx"):
        OpenAIEngine("toy", base_url=server.url, context_length=LENGTH + 1)


def test_connections_are_kept(make: Make) -> None:
    server, engine = make("One.\n\nTwo.")
    server.connections.clear()
    session = engine.open(ASK)
    for _ in range(3):
        session.read(step(session))
    assert len(server.connections) == 1
