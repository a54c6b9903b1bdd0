"""Templates: the prompt of a language model, and the tokens in its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from token2wav_client import ClientVoice
from token2wav_gateway.settings import SettingsError
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.template import Template, TokenReader, load_template
from token2wav_gateway.voices.voice_folder import Voice


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def read(template: Template, answer: list[str]) -> list[object]:
    reader = TokenReader(template)
    return [
        token
        for batch in [*(reader.feed(piece) for piece in answer), reader.close()]
        for token in batch.tolist()
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("name", "answer", "tokens"),
    [
        ("cosyvoice3", "<|s_12|><|s_0|><|eos|><|s_6560|>", [12, 0, 6560]),
        ("cosyvoice3", "<|s_1|><|s_6562|><|s_2|>", [1]),
        ("cosyvoice2", "<|s_1|><|s_6561|><|s_2|>", [1]),
        ("cosyvoice2", "noise <|s_7|>, <|s_8|", [7]),
        ("stepaudio2", "Hi<audio_5> there<audio_6561><audio_9>", [5, 9]),
        ("numbers", "17 4\n2051", [17, 4, 2051]),
        ("cosyvoice3", "<|s_\u0661|><|s_1\u0662|><|s_\uff13|><|s_5|>", [5]),
        ("numbers", "17 \u0661 4\uff12\u00b2 5", [17, 4, 5]),
        (
            "orpheus",
            "<custom_token_1>"
            + "".join(f"<custom_token_{10 + 4096 * codebook + codebook}>" for codebook in range(7))
            + "<custom_token_10>",
            [[0, 1, 2, 3, 4, 5, 6]],
        ),
    ],
)
def test_tokens_do_not_depend_on_the_pieces(
    name: str, answer: str, tokens: list[object], size: int
) -> None:
    assert read(load_template(name), pieces(answer, size)) == tokens


@pytest.mark.parametrize(
    ("sampling", "sent"), [({}, 2048), ({"max_tokens": 9}, 9), ({"max_tokens": 9999}, 2048)]
)
def test_a_client_can_only_lower_the_limit_of_tokens(sampling: dict[str, int], sent: int) -> None:
    template = load_template("cosyvoice3")
    text = Text("It rains.", Voice("joe"), sampling={"seed": 5, **sampling})
    body = template.body("speech", text)
    assert (body["seed"], body["max_tokens"], body["temperature"]) == (5, sent, 0.8)
    assert template.is_shortened(sampling) == (sent < 2048)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"speech_token_offset": 151663, "dtype": "bfloat16"}', None),
        (None, "No such file"),
        ("[]", "no speech_token_offset in JSON"),
        ("{}", "no speech_token_offset in JSON"),
        ("[" * 100_000, "no speech_token_offset in JSON"),
        ('{"speech_token_offset": -1}', "speech_token_offset is no integer"),
        ('{"speech_token_offset": true}', "speech_token_offset is no integer"),
    ],
)
def test_the_offset_of_a_converted_folder(
    tmp_path: Path, content: str | None, reason: str | None
) -> None:
    if content is not None:
        (tmp_path / "cosyvoice3_metadata.json").write_text(content)
    if reason is None:
        template = load_template("cosyvoice3_ids", tmp_path)
        assert TokenReader(template).feed_ids([151663, 151668, 151663 + 6562]).tolist() == [0, 5]
        with pytest.raises(SettingsError, match="folder: not for the template 'cosyvoice3'"):
            load_template("cosyvoice3", tmp_path)
        return
    with pytest.raises(SettingsError, match=rf"language_model.folder: .*_metadata.json: {reason}"):
        load_template("cosyvoice3_ids", tmp_path)


def orpheus(*codes: int) -> list[int]:
    """Returns the numbers of codes, which count from the first code of a frame."""
    return [10 + 4096 * (code % 7) + code for code in codes]


FRAME = list(range(7))
PAIRS = Template(prompt="{text}", token="<t{number}>", codebooks=2)


@pytest.mark.parametrize(
    ("template", "vocabulary", "numbers", "tokens", "skipped"),
    [
        ("numbers", (6561,), [1, 6562, 2], [1, 2], {"outside": 1}),
        ("numbers", (), [1, 999_999_999], [1, 999_999_999], {}),
        ("stepaudio2", (6561,), [1, 6561, 2, 6562], [1, 2], {"padding": 1, "outside": 1}),
        # The place of a code is known by its number.
        ("orpheus", (), orpheus(*range(14)), [FRAME, list(range(7, 14))], {}),
        ("orpheus", (), orpheus(*range(3), *range(4, 14)), [list(range(7, 14))], {"frame": 6}),
        ("orpheus", (), orpheus(5, *range(7)), [FRAME], {"frame": 1}),
        ("orpheus", (), orpheus(0, 0, *range(1, 7)), [FRAME], {"frame": 1}),
        ("orpheus", (), orpheus(*range(4), 3, *range(4, 7)), [FRAME], {"frame": 1}),
        ("orpheus", (), [*orpheus(0), 7, 99_999, *orpheus(*range(1, 7))], [FRAME], {"outside": 2}),
        # It is not: a number outside the vocabulary keeps its place.
        (PAIRS, (8, 4), [7, 3, 7, 4, 8, 1, 1, 2], [[7, 3], [1, 2]], {"outside": 2, "frame": 2}),
    ],
)
def test_numbers_that_are_no_speech_harm_no_other_token(
    template: str | Template,
    vocabulary: tuple[int, ...],
    numbers: list[int],
    tokens: list[object],
    skipped: dict[str, int],
) -> None:
    if isinstance(template, str):
        template = load_template(template)
    reader = TokenReader(template, vocabulary)
    text = "".join(f"{template.token.replace('{number}', str(number))} " for number in numbers)
    assert [*reader.feed(text).tolist(), *reader.close().tolist()] == tokens
    assert +reader.skipped == skipped


def test_endless_text_without_tokens_takes_no_memory() -> None:
    reader = TokenReader(load_template("cosyvoice3"))
    for _ in range(1000):
        assert len(reader.feed("no token at all, " * 10)) == 0
    assert len(reader._text) < 100


def test_the_prompt_has_the_words_and_the_tokens_of_the_voice() -> None:
    tensors = ClientVoice(
        np.array([1, 22], np.int32), np.zeros((4, 80), np.float32), np.ones(192, np.float32)
    )
    voice = Voice("anna", "My words. ", tensors)
    body = load_template("cosyvoice3").body("speech", Text("Hello {voice}.", voice))
    text = "You are a helpful assistant.<|endofprompt|>My words. Hello {voice}."
    assert body["messages"] == [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "<|s_1|><|s_22|>"},
    ]
    assert body["stream"] is True
    assert body["model"] == "speech"


def test_the_prompt_has_the_language() -> None:
    template = Template(prompt="({language}) {text}", token="<t{number}>")
    text = Text("Hallo.", Voice("anna"))
    assert template.body("speech", replace(text, language="German"))["prompt"] == "(German) Hallo."
    assert template.body("speech", text)["prompt"] == "(Auto) Hallo."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("token: '<t{number}>'", "mine.yaml: document: needs either messages or prompt"),
        ("{prompt: 'a {text}', token: '<t>'}", "token: must contain {number} once"),
        ("{prompt: 'a {password}', token: '{number}'}", "prompt: {password} is not one of"),
        ("{prompt: 'a {text.real}', token: '{number}'}", "prompt: {text.real} is not one of"),
        ("{prompt: 'a {text:>{x}}', token: '{number}'}", "prompt: {text} must contain the name"),
        ("{prompt: 'a {', token: '{number}'}", "prompt: "),
        (
            "{messages: [{role: user, content: '{}'}], token: '{number}'}",
            "messages.0.content: {} is not one of",
        ),
        (
            "{prompt: a, token: '{number}', code: x}",
            "unknown key 'code'; expected one of description, m",
        ),
        ("{prompt: a, token: '{number}', codebooks: 1000}", "codebooks: .*less than or equal"),
        ("{prompt: a, token: '{number}', request: {stream: no}}", "request: stream is set by"),
        ("{prompt: a, token: '{number}', request: {day: 2020-01-02}}", "request.day: .*JSON"),
        (
            "{prompt: a, token: '{number}', request: {t: .inf}}",
            "request.t.float: .*finite number",
        ),
        ("{prompt: a, token: a, token: '{number}'}", "line 1: key 'token' appears more than once"),
        ("[1", "while parsing"),
        ("{prompt: a, token: 2020-13-45}", "month must be in 1..12"),
        ("!!python/object/apply:os.system [ls]", "os.system' is unknown; nothing was executed"),
    ],
)
def test_a_wrong_template_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=reason) as caught:
        load_template(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(SettingsError, match="'gpt' is not one of cosyvoice2, "):
        load_template("gpt")
    with pytest.raises(SettingsError, match=r"'\.\./settings' is not one of"):
        load_template("../settings")
