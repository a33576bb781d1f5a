"""What a server on the open net has to live through: valid, wrong, broken and malicious requests, by a seeded die.

Each is bytes for a fresh connection and a rule for the answer. Nothing here sends anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
GREEDY = {"temperature": 0, "ignore_eos": True}
WORDS = ("the", "model", "reads", "a", "token", "and", "writes", "another", "while", "others", "wait", "for", "blocks")
KINDS = {"valid": 0.5, "leaves": 0.2, "wrong": 0.15, "broken": 0.12, "setting": 0.03}
NO_ANSWER = frozenset({0})  # the connection is closed without one
CLIENT_ERRORS = frozenset(range(400, 500))
MAX_STEPS = 24


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: one of `KINDS`.
        data: what is sent.
        statuses: answers that are right.
        expected: the text that must come; None where there is none to compare.
        leave_s: seconds after which the caller goes away; None for one that stays.
    """

    kind: str
    data: bytes
    statuses: frozenset[int]
    expected: str | None = None
    leave_s: float | None = None


def http(method: str, path: str, body: bytes, *extra: str, media: str = "application/json") -> bytes:
    """A request that closes its connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Type: {media}"]
    lines += extra or [f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Texts with the number of tokens to generate after each."""
    die = random.Random(seed)
    return [(" ".join(die.choices(WORDS, k=die.randint(1, 12))), die.randint(1, MAX_STEPS)) for _ in range(count)]


class Die:
    """Draws requests.

    Args:
        seed: same seed, same requests in the same order.
        answers: (prompt, tokens, text after it as completion, text after it as chat), computed before.
    """

    def __init__(self, seed: int, answers: Sequence[tuple[str, int, str, str]]) -> None:
        self._die, self._answers = random.Random(seed), answers
        self._makers: dict[str, Callable[[], Ask]] = {
            "valid": self.valid, "leaves": self._leaves, "wrong": self._wrong, "broken": self._broken,
            "setting": self._setting,
        }  # fmt: skip

    def draw(self) -> Ask:
        """The next request."""
        (kind,) = self._die.choices(list(KINDS), list(KINDS.values()))
        return self._makers[kind]()

    def _body(self) -> tuple[str, dict[str, Any], str]:
        prompt, tokens, completion, chat = self._die.choice(self._answers)
        path = self._die.choice(PATHS)
        body: dict[str, Any] = {**GREEDY, "max_tokens": tokens, "stream": self._die.random() < 0.5}
        if "chat" in path:
            return path, body | {"messages": [{"role": "user", "content": prompt}]}, chat
        return path, body | {"prompt": prompt}, completion

    def valid(self) -> Ask:
        """A request that must be answered, with the text that was computed before."""
        path, body, text = self._body()
        return Ask("valid", http("POST", path, json.dumps(body).encode()), frozenset({200}), text)

    def _leaves(self) -> Ask:
        path, body, _ = self._body()
        data = http("POST", path, json.dumps(body | {"max_tokens": 400}).encode())
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
        length = f"Content-Length: {len(good)}"
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
            (http("POST", path, good, length, f"X-Strata-Priority: {'9' * 5000}"), CLIENT_ERRORS),
            (http("POST", path, good, length, "X-Strata-Precision: ../precise"), CLIENT_ERRORS),
            (noise + b"\r\n\r\n", CLIENT_ERRORS | NO_ANSWER),
        ]
        data, statuses = die.choice(made)
        return Ask("broken", data, statuses)

    def _setting(self) -> Ask:
        good = self._die.random() < 0.5
        change = {"max_num_seqs": self._die.randint(4, 16)} if good else self._die.choice(WRONG_SETTINGS)
        data = http("PATCH", "/v1/optimizations", json.dumps(change).encode())
        return Ask("setting", data, frozenset({200}) if good else CLIENT_ERRORS)


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
    {"prompt": "", "messages": [], "prompt_embeds": []},
)  # fmt: skip
WRONG_SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"max_num_seqs": 0}, {"max_num_seqs": "many"}, {"max_model_len": 10**9}, {"nonsense": True},
    {"weight_format": "int3"}, {"cuda_graph": 7},
)  # fmt: skip
