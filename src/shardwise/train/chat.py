"""Turns a chat into token ids, and says which of them count in the loss: the assistant's, or all.

A record has `messages` (of `role` and `content`), `conversations` (ShareGPT's, of `from` and `value`), or `prompt` and
`completion`, each a text or messages. A content may be a list of parts that are texts. The model's own chat template
writes it out. A template that marks the assistant's words (`{% generation %}`) says itself which tokens those are. For
any other, they follow from what the template writes with and without each answer; where it rewrites earlier turns, as
Qwen3's does with thoughts, the last answer alone counts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from shardwise.config.errors import ConfigError

_ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
)
_ASSISTANT: Final = "assistant"

# A chat is written out in about a millisecond.
_TEMPLATE_S: Final = 5.0
_TEXT_PARTS: Final = ("text", "input_text", "output_text")

Messages = list[dict[str, Any]]


def is_chat(record: Mapping[str, Any]) -> bool:
    """Say whether a record is a chat: it has `messages`, `conversations`, or `prompt` and `completion`."""
    return "messages" in record or "conversations" in record or {"prompt", "completion"} <= record.keys()


def whole_text(text: str) -> str:
    """Return a text that UTF-8 has bytes for: JSON can escape half of a surrogate pair, which it has none for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True)
class ChatEncoder:
    """Writes chats out by the chat template of a `tokenizer` of transformers, and reads their tokens."""

    tokenizer: Any
    train_on: Literal["completions", "all"]
    name: str

    def encode(self, record: Mapping[str, Any], where: str) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Return the token ids of a record, and 1 for each that counts in the loss.

        Raises:
            ConfigError: it is no such record, it has no answer, or there is no chat template for it.
        """
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._encode_text(whole_text(prompt), whole_text(completion))
        messages, num_before = _messages_of(record, where)
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "no-chat-template",
                f"{where} is a chat, and the tokenizer of {self.name} has no chat template; give one that has as "
                "data.tokenizer, or records with prompt and completion as text",
            )
        try:
            with limited(_TEMPLATE_S):
                return self._encode_messages(messages, num_before, where)
        except LimitError as error:
            raise ConfigError(
                "chat-template-endless",
                f"{where}: the chat template of {self.name} does not end: {error}; mend the template, or give "
                "another tokenizer as data.tokenizer",
            ) from None

    def _encode_text(self, prompt: str, completion: str) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        before = self.tokenizer(prompt)["input_ids"]
        end = self.tokenizer.eos_token_id
        if before and before[-1] == end:  # some tokenizers close each text
            before = before[:-1]
        after = [*self.tokenizer(completion, add_special_tokens=False)["input_ids"], end]
        return _arrays([*before, *after], [self.train_on == "all"] * len(before) + [True] * len(after))

    def _encode_messages(
        self, messages: Messages, num_before: int, where: str
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):  # of several by name
            template = str(template.get("default"))
        if self.train_on == "completions" and "{% generation" in template.replace("{%-", "{%"):
            answer = self._apply(messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return _arrays(answer["input_ids"], answer["assistant_masks"])
        text = self._write(messages, where)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if self.train_on == "all":
            return _arrays(encoded["input_ids"], [True] * len(encoded["input_ids"]))
        spans = self._spans(messages, num_before, text, where)
        counts = [any(start <= begin < end for start, end in spans) for begin, _ in encoded["offset_mapping"]]
        return _arrays(encoded["input_ids"], counts)

    def _spans(self, messages: Messages, num_before: int, text: str, where: str) -> list[tuple[int, int]]:
        """Return where in the text the answers are, with what the template writes to close them."""
        answers = [index for index in range(num_before, len(messages)) if messages[index]["role"] == _ASSISTANT]
        if not answers:
            raise ConfigError(
                "chat-without-answer",
                f"{where} has no message of the assistant to learn from; leave it out, or set data.train_on=all",
            )
        spans = []
        for index in answers:
            before = self._write(messages[:index], where, begins_answer=True)
            through = text if index == len(messages) - 1 else self._write(messages[: index + 1], where)
            if text.startswith(before) and text.startswith(through) and len(before) < len(through):
                spans.append((len(before), len(through)))
        if not spans:
            raise ConfigError(
                "chat-template-rewrites",
                f"{where}: the chat template of {self.name} does not write an answer after its prompt, so it is not "
                "known which tokens are the assistant's; mark them in it ({% generation %}), or set data.train_on=all",
            )
        return spans

    def _write(self, messages: Messages, where: str, begins_answer: bool = False) -> str:
        text: str = self._apply(messages, where, tokenize=False, add_generation_prompt=begins_answer)
        return text

    def _apply(self, messages: Messages, where: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise what they like
            line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(
                "chat-template-refuses",
                f"{where}: the chat template of {self.name} refuses it: {line}; mend the record or the template",
            ) from None


def _messages_of(record: Mapping[str, Any], where: str) -> tuple[Messages, int]:
    """Return a record's messages, and how many of them are a prompt."""
    if "messages" in record or "conversations" in record:
        parts: tuple[Any, ...] = (record.get("messages", record.get("conversations")),)
    else:
        parts = (record["prompt"], record["completion"])
    both: list[Messages] = []
    for listed in parts:
        is_good = isinstance(listed, list) and all(isinstance(message, Mapping) for message in listed) and listed
        messages = [_message(message, where) for message in listed] if is_good else []
        if not is_good or not all(messages):
            raise ConfigError(
                "chat-messages",
                f"{where} has no messages: give a list of objects with role (system, user, assistant, tool) and "
                "content",
            )
        both.append(messages)
    return [message for listed in both for message in listed], len(both[0]) if len(both) == 2 else 0


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message in the words of chat templates; an empty one where it is none."""
    if "role" in message:
        # The content of a call of tools may be missing.
        content = message.get("content")
        is_good = isinstance(message["role"], str) and (content is None or isinstance(content, str | list))
        return {**message, "content": _text_of(content, where)} if is_good else {}
    role = _ROLES.get(str(message.get("from")))
    is_good = role is not None and isinstance(message.get("value"), str | list)
    return {"role": role, "content": _text_of(message["value"], where)} if is_good else {}


def _text_of(content: str | list[Any] | None, where: str) -> str | None:
    """Return a content as text; parts of text, as OpenAI writes them, follow each other as they stand."""
    if not isinstance(content, list):
        return None if content is None else whole_text(content)
    texts = []
    for piece in content:
        text = piece.get("text") if isinstance(piece, Mapping) and piece.get("type") in _TEXT_PARTS else piece
        if not isinstance(text, str):
            piece_type = piece.get("type") if isinstance(piece, Mapping) else type(piece).__name__
            raise ConfigError(
                "chat-part-not-text",
                f"{where} has a message with a part that is no text ({str(piece_type)[:80]!r}); leave out images and "
                'other parts, and write texts as {"type": "text", "text": "..."}',
            )
        texts.append(whole_text(text))
    return "".join(texts)


def _arrays(ids: Sequence[int], counts: Sequence[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    return np.array(ids, dtype=np.uint32), np.array(counts, dtype=np.uint8)


# What is done by then pays a timer, some 50 us.
_FIRST_LOOK_S: Final = 0.02
_MAX_BYTES: Final = 2**29


class LimitError(Exception):
    """What runs took more time or memory than it may."""


class _StopError(BaseException):
    """Is raised by another thread between two instructions of the code that is to end, which does not catch it."""


@contextmanager
def limited(limit_s: float, max_bytes: int = _MAX_BYTES) -> Iterator[None]:
    """End what runs inside, between two instructions of Python, after a time or when it has taken much memory.

    >>> with limited(0.2):
    ...     while True:
    ...         pass
    Traceback (most recent call last):
        ...
    shardwise.train.chat.LimitError: it is not done after 0.2 s

    Raises:
        LimitError: it was ended.
    """
    watch = _Watch(threading.get_ident(), limit_s, max_bytes)
    timer = threading.Timer(_FIRST_LOOK_S, watch.look)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _StopError:
        raise LimitError(watch.why) from None
    finally:
        watch.end()
        timer.cancel()


class _Watch:
    """Looks at a thread until it ends what it does, or is to be ended."""

    def __init__(self, thread: int, limit_s: float, max_bytes: int) -> None:
        self.why = ""
        self._thread, self._limit_s, self._max_bytes = thread, limit_s, max_bytes
        self._is_done = threading.Event()
        self._stopping = threading.Lock()

    def look(self) -> None:
        end_s = time.monotonic() + self._limit_s - _FIRST_LOOK_S
        process = psutil.Process()
        first_bytes = process.memory_info().rss
        while not self._is_done.wait(_FIRST_LOOK_S):
            has_much = process.memory_info().rss - first_bytes > self._max_bytes
            if has_much or time.monotonic() > end_s:
                self.why = (
                    "it takes more memory than it may" if has_much else f"it is not done after {self._limit_s:g} s"
                )
                with self._stopping:
                    if not self._is_done.is_set():
                        _raise_in(self._thread, _StopError)
                return

    def end(self) -> None:
        with self._stopping:
            self._is_done.set()
            if self.why:  # what was raised too late to be seen is taken back
                _raise_in(self._thread, None)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
