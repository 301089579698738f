"""Two readers, one verdict: what the quick one takes, the careful one takes too and reads alike; all else is left to the careful one."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint import checkpoint, documents, lint
from entrypoint.checkpoint import INDEX_NAME
from entrypoint.errors import Exit, Refusal

FILES = ["1.safetensors", "2.safetensors"]
TOKENS = '{"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9}]}'

# Put where nobody looks: after the part that is asked for.
SKIPPED = {
    "an object": ('{"a": [1, 2.5, -0, 1e400, null, true]}', True),
    "a string with escapes": (r'"\u00e9\ud83d\ude00\n\/"', True),
    "letters beyond ASCII": ('"é\u2028😀"', True),
    "a large number": ("9" * 400, True),
    "NaN": ("NaN", False),
    "-Infinity": ("-Infinity", False),
    "a zero before a number": ("01", False),
    "a number without its fraction": ("1.", False),
    "a comma too many": ("[1,]", False),
    "a comma too many in an object": ('{"a": 1,}', False),
    "a key without quotes": ("{a: 1}", False),
    "a single quote": ("'a'", False),
    "an escape that is none": (r'"\q"', False),
    "half an escape": (r'"\u12"', False),
    "a line break in a string": ('"a\nb"', False),
    "a control character": ('"\x1f"', False),
    "an open string": ('"a', False),
    "an open list": ("[[1]", False),
    "a word": ("nul", False),
    "too deep": ("[" * 100_000, False),
}
# The careful one takes these, the quick one does not.
SLOW = {
    "half a pair": r'"\ud83d"',
    "the wrong half": r'"\udc00\ud800"',
}


def careful(monkeypatch, read, *arguments):
    with monkeypatch.context() as patch:
        for module in (checkpoint, lint):
            patch.setattr(module, "quick", lambda decoder, text: None)
        return read(*arguments)


def alike(monkeypatch, read, *arguments):
    """What both readers give; a Refusal is its words."""

    def ended(run):
        try:
            return run()
        except Refusal as refusal:
            assert refusal.code == Exit.CHECKPOINT and refusal.fix and "\n" not in refusal.message
            return refusal.message

    quick, slow = ended(lambda: read(*arguments)), ended(lambda: careful(monkeypatch, read, *arguments))
    assert quick == slow
    return slow


def index_text(more: str = "") -> str:
    return json.dumps({"weight_map": {"a": FILES[0], "b": FILES[1]}})[:-1] + more + "}"


@pytest.mark.parametrize("case", SKIPPED)
def test_what_nobody_asks_for_must_be_json_too(monkeypatch, case):
    value, right = SKIPPED[case]
    index = alike(monkeypatch, checkpoint._weight_map, index_text(f', "x": {value}').encode(), FILES)
    tokens = alike(monkeypatch, lint._token_ids, (TOKENS[:-1] + f', "x": {value}}}').encode(), "tokenizer.json")
    if right:
        assert (index, tokens) == ({"a": FILES[0], "b": FILES[1]}, [0, 7, 9])
    else:
        words = "nested too deeply" if case == "too deep" else "not valid JSON"
        assert words in index and INDEX_NAME in index
        assert words in tokens and "tokenizer.json" in tokens


@pytest.mark.parametrize("case", SLOW)
def test_what_only_the_careful_one_takes(monkeypatch, case):
    text = (TOKENS[:-1] + f', "x": {SLOW[case]}}}').encode()
    assert documents.quick(lint._TOKENIZER, text) is None
    assert alike(monkeypatch, lint._token_ids, text, "tokenizer.json") == [0, 7, 9]


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", "é".encode("latin-1")])
def test_strings_that_are_not_utf_8(monkeypatch, text):
    said = alike(monkeypatch, lint._token_ids, TOKENS[:-1].encode() + b', "x": "' + text + b'"}', "tokenizer.json")
    assert "not valid JSON" in said


@pytest.mark.parametrize(
    ("weight_map", "wanted"),
    [
        ('{"a": "1.safetensors"}', {"a": FILES[0]}),
        ('{"a": "1.safetensors", "a": "2.safetensors"}', {"a": FILES[1]}),
        ('{"a": "other.safetensors"}', {"a": "other.safetensors"}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": null}', {"a": None}),
        ('{"a": ["1.safetensors"]}', {"a": [FILES[0]]}),
        (r'{"\u0061": "1.safetensors"}', {"a": FILES[0]}),
        ("{}", {}),
        ("[]", []),
        ('"1.safetensors"', FILES[0]),
        ('{"a": "1.safetensors"}, "weight_map": {"b": "2.safetensors"}', {"b": FILES[1]}),
        ('3, "weight_map": {"b": "2.safetensors"}', {"b": FILES[1]}),
    ],
)
@pytest.mark.parametrize("present", [FILES, FILES[:1], []])
def test_an_index_is_read_alike(monkeypatch, weight_map, wanted, present):
    text = f' {{"metadata": {{}}, "weight_map": {weight_map}}}\n'.encode()
    assert alike(monkeypatch, checkpoint._weight_map, text, present) == wanted


@pytest.mark.parametrize(
    ("vocab", "added", "wanted"),
    [
        ('{"a": 3, "b": 5}', "[]", [3, 5]),
        ('{"a": 3, "a": 5}', "[]", [5]),
        ('{"a": 3, "b": 5.0}', "[]", [3]),
        ('{"a": 3, "b": 1e2}', "[]", [3]),
        ('{"a": 3, "b": true}', "[]", [3]),
        ('{"a": 3, "b": "5"}', "[]", [3]),
        ('{"a": -3, "b": 36893488147419103232}', "[]", [-3, 1 << 65]),
        ('{"a": 1%s}' % ("0" * 400), "[]", [10**400]),
        ('[["a", -1.5], ["b", -2.5]]', "[]", [0, 1]),
        ('{"a": 3}', '[{"id": 9, "content": "x"}]', [3, 9]),
        ('{"a": 3}', '[{"content": "x"}, {"id": 9.5}, {"id": 8}, 7, null]', [3, 8]),
        ('{"a": 3}', "null", [3]),
        ('{"a": 3}', '{"id": 9}', [3]),
        ("null", "[]", None),
        ("3", "[]", None),
    ],
)
def test_a_tokenizer_is_read_alike(monkeypatch, vocab, added, wanted):
    text = f'{{"added_tokens": {added}, "model": {{"merges": [["a", "b"]], "vocab": {vocab}}}}}'.encode()
    assert alike(monkeypatch, lint._token_ids, text, "tokenizer.json") == wanted
    assert alike(monkeypatch, lint._token_ids, f'{{"model": {vocab}}}'.encode(), "tokenizer.json") is None


class Wanted(msgspec.Struct):
    """Asks for one part of an object and skips the rest."""

    wanted: object = None


@settings(max_examples=500, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("wanted"), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    st.integers(0, 10_000),
    st.binary(max_size=2),
)
def test_any_json_with_any_bytes_put_in(value, place, bytes_):
    whole = json.dumps({"wanted": 1, "more": value, "last": value}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for text in (whole, whole[: place % len(whole)] + bytes_ + whole[place % len(whole) :]):
        found = documents.quick(msgspec.json.Decoder(Wanted), text)
        if found is not None:
            assert documents.parse_object(text, "x").get("wanted") == found.wanted
