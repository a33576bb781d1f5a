"""What a server on the open net has to live through: valid, wrong, broken and malicious requests, by a seeded die.

Each is bytes for a fresh connection and a rule for the answer. Nothing here sends anything.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
GREEDY = {"temperature": 0, "ignore_eos": True}
WORDS = ("the", "model", "reads", "a", "token", "and", "writes", "another", "while", "others", "wait", "for", "blocks")
KINDS = {"valid": 0.5, "leaves": 0.2, "wrong": 0.15, "broken": 0.12, "setting": 0.03}
NO_ANSWER = frozenset({0})  # the connection is closed without one
CLIENT_ERRORS = frozenset(range(400, 500))
MAX_STEPS = 24
DEFAULT, URGENT, URGENT_FROM = "precise", "fast", 5
ROUTES = {DEFAULT: "fp32", URGENT: "int4"}  # engine to weight format
PRECISION, PRIORITY = "X-Strata-Precision", "X-Strata-Priority"


@dataclass(frozen=True)
class Known:
    """A prompt whose continuation was computed before.

    Attributes:
        paths: endpoints that take it.
        body: its fields.
        texts: engine to the text that must come.
    """

    paths: tuple[str, ...]
    body: Mapping[str, Any]
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: one of `KINDS`.
        data: what is sent.
        statuses: answers that are right.
        expected: the text that must come; None where there is none to compare.
        leave_s: seconds after which the caller goes away; None for one that stays.
        marks: what to count it under beside its kind.
    """

    kind: str
    data: bytes
    statuses: frozenset[int]
    expected: str | None = None
    leave_s: float | None = None
    marks: tuple[str, ...] = ()


def http(
    method: str, path: str, body: bytes, *extra: str, media: str = "application/json", headers: Sequence[str] = ()
) -> bytes:
    """A request that closes its connection; `extra` stands in place of the length, `headers` beside it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Type: {media}", *headers]
    lines += extra or [f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Texts with the number of tokens to generate after each."""
    die = random.Random(seed)
    return [(" ".join(die.choices(WORDS, k=die.randint(1, 12))), die.randint(1, MAX_STEPS)) for _ in range(count)]


def rows_field(rows: Any) -> str:
    """The field `prompt_embeds`: base64 of a NumPy file."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


class Die:
    """Draws requests.

    Args:
        seed: same seed, same requests in the same order.
        known: prompts with their answers, at least one for each of `PATHS`.
    """

    def __init__(self, seed: int, known: Sequence[Known]) -> None:
        self._die = random.Random(seed)
        self._known = {path: [one for one in known if path in one.paths] for path in PATHS}
        self._makers: dict[str, Callable[[], Ask]] = {
            "valid": self.valid, "leaves": self._leaves, "wrong": self._wrong, "broken": self._broken,
            "setting": self._setting,
        }  # fmt: skip

    def draw(self) -> Ask:
        """The next request."""
        (kind,) = self._die.choices(list(KINDS), list(KINDS.values()))
        return self._makers[kind]()

    def _body(self) -> tuple[str, dict[str, Any], Known]:
        path = self._die.choice(PATHS)
        known = self._die.choice(self._known[path])
        return path, {**GREEDY, **known.body, "stream": self._die.random() < 0.5}, known

    def _route(self) -> tuple[str, dict[str, Any], list[str]]:
        """An engine, and the fields and headers of a request that it must answer."""
        name, other = self._die.sample(list(ROUTES), 2)
        rank = self._die.randint(-URGENT_FROM, 2 * URGENT_FROM)
        by_rank = URGENT if rank >= URGENT_FROM else DEFAULT
        ways: list[tuple[str, dict[str, Any], list[str]]] = [
            (DEFAULT, {}, []),
            (name, {"model": name, "priority": rank}, []),
            (name, {}, [f"{PRECISION}: {name}"]),
            (name, {"model": other}, [f"{PRECISION}: {name}"]),
            (by_rank, {"priority": rank}, []),
            (by_rank, {}, [f"{PRIORITY}: {rank}"]),
        ]
        return self._die.choice(ways)

    def valid(self) -> Ask:
        """A request that must be answered, with the text that was computed before."""
        path, body, known = self._body()
        engine, fields, headers = self._route()
        data = http("POST", path, json.dumps(body | fields).encode(), headers=headers)
        marks = (engine, "embeds") if "prompt_embeds" in body else (engine,)
        return Ask("valid", data, frozenset({200}), known.texts[engine], marks=marks)

    def _leaves(self) -> Ask:
        path, body, _ = self._body()
        _, fields, headers = self._route()
        data = http("POST", path, json.dumps(body | fields | {"max_tokens": 400}).encode(), headers=headers)
        if self._die.random() < 0.2:  # in the middle of its own request
            data = data[: self._die.randint(1, len(data) - 1)]
        return Ask("leaves", data, frozenset(), leave_s=self._die.expovariate(50))

    def _wrong(self) -> Ask:
        path, body, _ = self._body()
        change: dict[str, Any] = self._die.choice(WRONG)
        return Ask("wrong", http("POST", path, json.dumps(body | change).encode()), CLIENT_ERRORS)

    def _broken(self) -> Ask:
        die = self._die
        path, body, _ = self._body()
        good = json.dumps(body).encode()
        noise = die.randbytes(die.randint(1, 300))
        made: list[tuple[bytes, frozenset[int]]] = [
            (http("POST", path, good[:-1]), CLIENT_ERRORS),
            (http("POST", path, noise), CLIENT_ERRORS),
            (http("POST", path, b"[" * 100_000), CLIENT_ERRORS),
            (http("POST", path, b'{"a":' * 20_000 + b"1" + b"}" * 20_000), CLIENT_ERRORS),
            (http("POST", path, b'{"prompt": "\xff\xfe"}'), CLIENT_ERRORS),
            (http("POST", path, b'{"prompt": "x", "temperature": NaN}'), CLIENT_ERRORS),
            (http("POST", path, b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}"), CLIENT_ERRORS),
            (http("POST", path, good, media="text/plain"), CLIENT_ERRORS),
            (http("POST", path, b"", "Content-Length: 99999999999999999999"), CLIENT_ERRORS | NO_ANSWER),
            (http("POST", path, b"", "Content-Length: -1"), CLIENT_ERRORS | NO_ANSWER),
            (http("POST", path, b"zz\r\n", "Transfer-Encoding: chunked"), CLIENT_ERRORS | NO_ANSWER),
            (http("POST", path, good, f"X-Long: {'a' * 100_000}"), CLIENT_ERRORS | NO_ANSWER),
            (http(die.choice(("GET", "DELETE", "PUT", "FROB")), path, b""), CLIENT_ERRORS | NO_ANSWER),
            (http("POST", "/" + "../" * 50 + "etc/passwd", good), CLIENT_ERRORS),
            (http("POST", f"{path}?{'q=1&' * 500}", good[:-1]), CLIENT_ERRORS),
            (http("POST", path, good, headers=[f"{PRIORITY}: {'9' * 5000}"]), CLIENT_ERRORS),
            (http("POST", path, good, headers=[f"{PRIORITY}: 1_0"]), CLIENT_ERRORS),
            (http("POST", path, good, headers=[f"{PRECISION}: ../{DEFAULT}"]), CLIENT_ERRORS),
            (
                http("POST", path, json.dumps({**body, "priority": 1}).encode(), headers=[f"{PRIORITY}: 2"]),
                CLIENT_ERRORS,
            ),
            (noise + b"\r\n\r\n", CLIENT_ERRORS | NO_ANSWER),
        ]
        data, statuses = die.choice(made)
        return Ask("broken", data, statuses)

    def _setting(self) -> Ask:
        good = self._die.random() < 0.5
        engines = ("", *(f"?model={name}" for name in ROUTES))
        change = {"max_num_seqs": self._die.randint(4, 16)} if good else self._die.choice(WRONG_SETTINGS)
        engine = self._die.choice(engines if good else (*engines, "?model=gpt", "?model="))
        data = http("PATCH", f"/v1/optimizations{engine}", json.dumps(change).encode())
        return Ask("setting", data, frozenset({200}) if good else CLIENT_ERRORS)


TERABYTES = b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 32)}"  # says a NumPy file of few bytes
WRONG_ROWS = (
    rows_field(np.full((2, 32), np.nan, np.float32)), rows_field(np.zeros((2, 31), np.float32)),
    rows_field(np.zeros((0, 32), np.float32)), rows_field(np.zeros((600, 32), np.float16)),
    rows_field(np.zeros(32, np.float32)), rows_field(np.zeros((2, 32), np.int64)),
    base64.b64encode(b"\x93NUMPY\x01\x00" + bytes((len(TERABYTES), 0)) + TERABYTES).decode(),
)  # fmt: skip
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": 1e300}, {"max_tokens": 0}, {"max_tokens": 1.5},
    {"max_tokens": None, "min_tokens": -1}, {"n": 0}, {"n": 10**9}, {"n": 2}, {"seed": -1}, {"seed": 2**70},
    {"top_p": 0}, {"top_k": -5}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 1e9}}, {"logit_bias": {"x": 1}},
    {"stop": [""] * 3}, {"stop": ["a"] * 1000}, {"stop_token_ids": [10**12]}, {"model": "../../etc/passwd"},
    {"prompt": [], "messages": []}, {"prompt": [-1], "messages": [{}]}, {"unknown\udc00": 1}, {"stream": "yes"},
    {"prompt": [1] * 5000, "messages": [{"role": "user", "content": "x" * 5000}]}, {"guided_regex": "("},
    {"guided_json": {"type": "nonsense"}}, {"structured_outputs": {}}, {"prompt": {"a": 1}, "messages": 3},
    {"timeout_s": -3}, {"priority": 2**40}, {"bad_words": [" "]}, {"stream_options": {"x": 1}},
    {"prompt_embeds": "UEsDBA=="}, {"prompt": "", "messages": [], "prompt_embeds": "gAKKCg=="},
    {"prompt": None, "messages": [], "prompt_embeds": "/////////39h"},
    {"prompt": "", "messages": [], "prompt_embeds": []}, {"model": "gpt"},
    *({"prompt_embeds": field} for field in WRONG_ROWS),
)  # fmt: skip
WRONG_SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"max_num_seqs": 0}, {"max_num_seqs": "many"}, {"max_model_len": 10**9}, {"nonsense": True},
    {"weight_format": "int3"}, {"cuda_graph": 7},
)  # fmt: skip
