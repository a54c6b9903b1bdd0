"""HyperPyYAML as data: references are resolved, and no tag of a file is ever executed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from testkit.models.tiny_model import one_line
from token2wav import ConfigError
from token2wav.published.hyperyaml import MAX_VALUES, HyperYaml, Tagged


def read(tmp_path: Path, text: str) -> HyperYaml:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return HyperYaml.read(path)


def refusal(tmp_path: Path, text: str, key: str = "x") -> str:
    """Returns the message of the ConfigError that reading the file, or one of its keys, raises."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text).resolve(key)
    message = one_line(caught.value)
    assert str(tmp_path / "file.yaml") in message
    return message


BASE = (
    "a: 7\nb: 2\nf: 0.5\nn: -3\nnest: !new:some.Class {inner: {deep: 11}, flat: 5}\nlist: [1, 2]\n"
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("<a>", 7),
        ("<a> + <b>", 9),
        ("<a> - <b>", 5),
        ("<a> * <b>", 14),
        ("<a> / <b>", 3.5),
        ("<a> // <b>", 3),
        ("<a> % <b>", 1),
        ("<a>*<b>+1", 15),
        ("<a> + <b> * 2", 11),
        ("(<a> + <b>) * 2", 18),
        ("-<a>", -7),
        ("-(<a> - 10) * <f>", 1.5),
        ("<n> - <n>", 0),
        ("<n> // <b>", -2),
        ("<a> * 1.5", 10.5),
        ("3 + 4", 7),
        ("(" * 90 + "<a>" + ")" * 90, 7),
        ("-" * 190 + "<a>", 7),
        ("<nest[flat]>", 5),
        ("<nest[inner][deep]> + <nest[flat]>", 16),
    ],
)
def test_references_and_arithmetic(tmp_path: Path, expression: str, value: float) -> None:
    number = read(tmp_path, f"{BASE}x: !ref '{expression}'\n").resolve("x")
    assert number == value
    assert type(number) is type(value)


def test_numbers_of_yaml_1_2_are_numbers(tmp_path: Path) -> None:
    document = read(tmp_path, "x: [1e-06, -2E+3, 1e5, 1.5e-3, '1e5', 1e, e5]\n")
    assert document.resolve("x") == [1e-6, -2000.0, 1e5, 1.5e-3, "1e5", "1e", "e5"]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("<a> ** <b>", "only numbers"),
        ("2 ** 99999999", "only numbers"),
        ("<a>()", "only numbers"),
        ("__import__('os').system('true')", "only numbers"),
        ("<a>.__class__", "only numbers"),
        ("<list>[0]", "only numbers"),
        ("(lambda: <a>)()", "only numbers"),
        ("[<a>] * 10", "only numbers"),
        ("'text' * <a>", "only numbers"),
        ("<a> if <b> else <n>", "only numbers"),
        ("<a> < <b>", "only numbers"),
        ("<a> and <b>", "only numbers"),
        ("True + <a>", "only numbers"),
        ("1j + <a>", "only numbers"),
        ("a + 1", "only numbers"),
        ("<list> + <list>", "only numbers"),
        ("<nest> * 2", "only numbers"),
        ("<a> / 0", "zero"),
        ("<a> +", "not arithmetic"),
        ("", "not arithmetic"),
        ("+".join(["<a>"] * 300), "longer than 200 characters"),
    ],
)
def test_anything_but_arithmetic_is_refused(tmp_path: Path, expression: str, words: str) -> None:
    message = refusal(tmp_path, f'{BASE}x: !ref "{expression}"\n')
    assert words in message
    assert "'x'" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: !ref <nowhere>\n", "'nowhere' is missing"),
        ("x: !ref <y> + 1\ny: !ref <nowhere>\n", "'nowhere' is missing"),
        ("x: !ref <y[no]>\ny: {yes: 1}\n", "<y[no]>"),
        ("x: !ref <y[k][l]>\ny: {k: 1}\n", "<y[k][l]>"),
        ("x: !ref <y[0]>\ny: [1]\n", "<y[0]>"),
        ("x: !ref <x>\n", "circular reference x -> x"),
        ("x: !ref <y>\ny: !ref <z> + 1\nz: [!ref <x>]\n", "circular reference x -> y -> z -> x"),
        ("x: {inner: !ref '<x[other]>', other: 1}\n", "circular reference x -> x"),
        ("y: 1\n", "key 'x' is missing"),
    ],
)
def test_references_to_nothing_or_in_a_circle_are_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    assert words in refusal(tmp_path, text)


# Nothing is executed.


@pytest.mark.parametrize(
    "attack",
    [
        'x: !apply:os.system ["touch {bait}"]',
        'x: !new:subprocess.Popen [["touch", "{bait}"]]',
        "x: !new:pathlib.Path.touch {{self: '{bait}'}}",
        "x: !name:os.system 'touch {bait}'",
        "x: !module:antigravity",
        "x: !include:{bait}",
        "x: !applyref:os.system {{_args: ['touch {bait}']}}",
        "y: !apply:os.system ['touch {bait}']\nx: !ref <y>",
        "x: !copy <y>\ny: !apply:os.system ['touch {bait}']",
    ],
)
def test_local_tags_execute_nothing(tmp_path: Path, attack: str) -> None:
    bait = tmp_path / "executed"
    document = read(tmp_path, attack.format(bait=bait) + "\n")
    value = document.resolve("x")
    assert isinstance(value, Tagged)
    assert not bait.exists()


@pytest.mark.parametrize(
    "attack",
    [
        "x: !!python/object/apply:os.system ['touch {bait}']",
        "x: !!python/object/new:os.system ['touch {bait}']",
        "x: !!python/object:pathlib.Path {{}}",
        "x: !!python/name:os.system ''",
        "x: !!python/module:os ''",
        "x: !<tag:yaml.org,2002:python/object/apply:os.system> ['touch {bait}']",
        "%TAG !p! tag:yaml.org,2002:python/\n---\nx: !p!object/apply:os.system ['touch {bait}']",
        "unused: {{deep: [!!python/object/apply:os.system ['touch {bait}']]}}\nx: 1",
    ],
)
def test_python_tags_are_refused_with_one_sentence(tmp_path: Path, attack: str) -> None:
    bait = tmp_path / "executed"
    message = refusal(tmp_path, attack.format(bait=bait) + "\n")
    assert "nothing was executed" in message
    assert "line " in message
    assert not bait.exists()


# Files that are no model files.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping at the top level, got NoneType"),
        ("# only a comment\n", "got NoneType"),
        ("- a\n- b\n", "got list"),
        ("just text\n", "got str"),
        ("!new:pkg.Class {x: 1}\n", "got Tagged"),
        ("x: [1\n", "cannot be read as YAML"),
        ("x: 1\n\ty: 2\n", "cannot be read as YAML"),
        ("x: 1\n---\nx: 2\n", "cannot be read as YAML"),
        ("x: *nowhere\n", "cannot be read as YAML"),
        ("x: 2024-99-99\n", "cannot be read as YAML"),
        ("x: !!int abc\n", "cannot be read as YAML"),
        ("x: " + "9" * 5000 + "\n", "cannot be read as YAML"),
        ("? [a, b]\n: 1\n", "line 1: found unhashable key"),
        ("x: " + "[" * 3000 + "]" * 3000 + "\n", "cannot be read as YAML"),
        ("x: &a {k: *a}\n", "nested too deep, or in itself"),
        ("x: &a [*a]\n", "nested too deep, or in itself"),
        ("x: 1\ny: 2\nx: 1\n", "line 3: key 'x' appears more than once, first in line 1"),
        ("y: {a: 1, x: {b: 1, b: 2}}\n", "line 1: key 'b' appears more than once"),
        (
            "y: !new:pkg.Class\n  a: 1\n  a: 1\n",
            "line 3: key 'a' appears more than once, first in line 2",
        ),
        (
            "y: &y {a: 1}\nx: {<<: *y}\n",
            "line 2: merge keys (<<) are not allowed; write the keys out",
        ),
        ("x: !!int ''\n", "cannot be read as YAML"),
        ("x: !!float ''\n", "cannot be read as YAML"),
        ("x: !!bool maybe\n", "cannot be read as YAML"),
        ("x: !!timestamp now\n", "cannot be read as YAML"),
        ("? !t [1]\n: 1\n", "cannot be read as YAML"),
        ("x: " + "1:" * 5000 + "1\n", "a value has 10001 characters; at most 4000 are allowed"),
        ("x: 0x" + "f" * 5000 + "\n", "a value has 5002 characters; at most 4000 are allowed"),
        ("x: !t &a {k: *a}\n", "recursive"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize("kind", ["aliases", "references", "sums"])
def test_a_small_file_cannot_become_a_huge_value(tmp_path: Path, kind: str) -> None:
    lines = ["k0: &k0 [1, 1]"]
    for level in range(1, 60):
        before = level - 1
        lines.append(
            {
                "aliases": f"k{level}: &k{level} [*k{before}, *k{before}]",
                "references": f"k{level}: [!ref <k{before}>, !ref <k{before}>]",
                "sums": f"k{level}: !ref <k{before}> + <k{before}>",
            }[kind]
        )
    if kind == "sums":
        lines[0] = "k0: 1"
    text = "\n".join(lines) + "\n"
    assert f"more than {MAX_VALUES} values" in refusal(tmp_path, text, "k59")
    small = read(tmp_path, text).resolve("k3")
    assert small == 8 if kind == "sums" else leaves(small) == 16


def leaves(value: Any) -> int:
    return sum(map(leaves, value)) if isinstance(value, list) else 1


def test_a_long_chain_of_references_is_followed_or_refused(tmp_path: Path) -> None:
    def chain(length: int) -> str:
        return "k0: 5\n" + "".join(f"k{i}: !ref <k{i - 1}>\n" for i in range(1, length + 1))

    assert read(tmp_path, chain(50)).resolve("k50") == 5
    assert "nested too deep" in refusal(tmp_path, chain(5000), "k5000")


def test_numbers_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    """A product of products of long integers would take minutes."""
    text = "k0: 1000000\n" + "".join(f"k{i}: !ref <k{i - 1}> * <k{i - 1}>\n" for i in range(1, 6))
    assert read(tmp_path, text).resolve("k1") == 10**12
    assert "an integer of more than 64 bits" in refusal(tmp_path, text, "k5")
    long = f"x: 0x{'f' * 17}\ny: !ref <x> % 7\nz: !ref -0x{'f' * 17} + 1\n"
    for key in "yz":
        assert "an integer of more than 64 bits" in refusal(tmp_path, long, key)
    assert math.isinf(read(tmp_path, "x: .inf\n").resolve("x"))
