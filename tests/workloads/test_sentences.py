"""Pairs of sentences: pieces, vocabularies, files, catalogues and number words, and what is refused."""

from __future__ import annotations

import encodings.aliases
import gettext
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mo_writer import write_mo

from plait.core.errors import DataError
from plait.workloads.data import build
from translation.bpe import join_pieces, learn_codes, read_codes
from translation.catalogues import clean, clean_pairs, read_mo
from translation.encoding import learn_encoding
from translation.number_words import in_english, in_german
from translation.pairs import SentencePairs, group_by_length
from translation.vocabulary import BEGIN, END, PAD, SPECIAL, UNKNOWN, read_vocabulary
from translation.words import join_words, split_words

WORDS = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3


# Byte-pair encoding


def test_the_first_merges_are_those_of_the_published_example():
    assert learn_codes(WORDS, 3).merges == (("e", "s"), ("es", "t</w>"), ("l", "o"))


def test_each_learned_merge_joins_a_pair_that_is_among_the_most_frequent_by_then():
    words = [*WORDS, "aaaa", "aaaa", "baab", "baab"]
    spelled = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
    merges = learn_codes(words, 12).merges
    assert len(merges) == 12
    for merge in merges:
        pairs = Counter(pair for symbols in spelled for pair in pairwise(symbols))
        assert pairs[merge] == max(pairs.values())
        for symbols in spelled:
            place = 0
            while place < len(symbols) - 1:
                if tuple(symbols[place : place + 2]) == merge:
                    symbols[place : place + 2] = ["".join(merge)]
                place += 1


def test_learned_codes_depend_on_no_order_and_end_where_no_pair_stands_twice():
    words = [*WORDS, *["ab", "ba", "cd", "dc", "ef", "fe"] * 2]
    found = {learn_codes(random.Random(seed).sample(words, len(words)), 6).merges for seed in range(8)}
    assert len(found) == 1
    assert learn_codes(["abc"], 9).merges == ()


@given(st.lists(st.text("abé-", min_size=1, max_size=8), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_pieces_join_to_the_words_they_are_of(words):
    assert join_pieces(learn_codes([*words, *words], 20).pieces(words)) == words


def test_both_versions_of_code_files_are_read(tmp_path):
    (tmp_path / "new").write_text("#version: 0.2\nl o\nlo w</w>\n")
    (tmp_path / "old").write_text("l o\nlo w\nlow </w>\n")
    assert read_codes(tmp_path / "new").pieces(["low", "lower"]) == ["low", "lo@@", "w@@", "e@@", "r"]
    assert read_codes(tmp_path / "old").pieces(["low", "lower"]) == ["low", "low@@", "e@@", "r"]


def test_codes_that_are_none_are_refused_with_their_line(tmp_path):
    (tmp_path / "codes").write_text("#version: 0.2\nl o\nlow 17 x\n")
    with pytest.raises(DataError, match=r"codes, line 3: found 'low 17 x', expected two pieces"):
        read_codes(tmp_path / "codes")
    for content in ("the 12\nof 9\n", "#version: 0.2\n"):
        (tmp_path / "codes").write_text(content)
        with pytest.raises(DataError, match=r"expected two pieces to join; .* belongs to data.vocabulary"):
            read_codes(tmp_path / "codes")
    (tmp_path / "codes").write_text("#version: 9.1\nl o\n")
    with pytest.raises(DataError, match=r"line 1: found version '9.1'"):
        read_codes(tmp_path / "codes")


# Vocabularies and words


def test_a_vocabulary_file_may_have_counts_and_special_tokens(tmp_path):
    (tmp_path / "vocab").write_text("<unk>\n<s>\n</s>\nder 12\ndie 9\n")
    vocabulary = read_vocabulary(tmp_path / "vocab")
    assert len(vocabulary) == len(SPECIAL) + 2
    assert vocabulary.numbers(["die", "der", "das"]) == [5, 4, UNKNOWN]
    assert vocabulary.tokens([BEGIN, 4, 99, END, 5, PAD]) == ["der", "<unk>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("der 12\ndie viele\n", r"line 2: found 'die viele', expected a token, or a token and its count"),
        ("der\ndie\nder\n", r"line 3: the token 'der' is already in line 1"),
        ("", r"found an empty file, expected a vocabulary"),
    ],
)
def test_a_wrong_vocabulary_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "vocab").write_text(content)
    with pytest.raises(DataError, match=message):
        read_vocabulary(tmp_path / "vocab")


@pytest.mark.parametrize(
    "text",
    [
        "Er sagt: „Nein, danke“, und geht (langsam).",
        "Datei »%s« wurde nicht gefunden!",
        'The option --no-color takes "always" or 1,000.5 of them.',
        "can't open '%s' for writing",
    ],
)
def test_text_is_put_together_as_it_was(text):
    assert join_words(split_words(text)) == text


def test_what_moses_tokenised_is_put_together():
    words = ["Das", "ist", "&quot;", "gut", "&quot;", "&amp;", "20", "@-@", "mal", "besser", "."]
    assert join_words(words) == 'Das ist "gut" & 20-mal besser.'


# Batches


def encoded(*pairs: tuple[str, str]) -> SentencePairs:
    sources, targets = zip(*pairs)
    return SentencePairs(sources, targets, learn_encoding([*sources, *targets], 50, None))


def test_a_batch_is_padded_at_the_end_of_each_side():
    pairs = encoded(("a b c", "x y"), ("a", "x y z"))
    (source, previous), target = pairs.collated_batch([0, 1])
    assert source.shape == (2, 4)
    assert source[0, -1] == END
    assert source[1, 1:].tolist() == [END, PAD, PAD]
    assert previous[:, 0].tolist() == [BEGIN, BEGIN]
    assert target[0].tolist() == [*previous[0, 1:3].tolist(), END, PAD]
    assert pairs.reference(1) == "x y z"


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=40),
    st.one_of(st.tuples(st.integers(1, 9), st.none()), st.tuples(st.none(), st.integers(5, 90))),
)
@settings(max_examples=100, deadline=None)
def test_every_pair_is_in_one_group_of_the_size_that_was_asked_for(lengths, wanted):
    sentences, tokens = wanted
    groups = group_by_length(torch.tensor(lengths).numpy(), sentences, tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    if sentences is not None:
        assert sorted(map(len, groups))[1:] == [sentences] * (len(groups) - 1)
    else:
        padded = [len(group) * max(lengths[i] for i in group) for group in groups]
        assert all(size <= tokens or len(group) == 1 for size, group in zip(padded, groups))


def test_groups_hold_what_their_pairs_hold():
    alone = build("translation.number_words:number_words", "test", test_samples=40)
    grouped = build("translation.number_words:number_words", "test", test_samples=40, tokens=60)
    (source, previous), target = grouped.collated_batch([0, 1])
    assert source.dim() == previous.dim() == target.dim() == 3
    rows = {tuple(row[row != PAD].tolist()) for row in source.flatten(0, 1) if (row != PAD).any()}
    assert rows <= {tuple(alone.source_numbers(i)) for i in range(40)}
    assert source[0].numel() <= 2 * 60


def test_example_batches_show_which_sizes_change():
    for options in ({}, {"sentences": 4}, {"tokens": 40}):
        dataset = build("translation.number_words:number_words", "train", samples=200, **options)
        (a, b), (c, d) = (dataset.collated_batch(numbers)[0] for numbers in dataset.example_indices((3, 2)))
        lengths = [x.shape[-1] for x in (a, b, c, d)]
        assert len(a) == 3
        assert lengths[0] != lengths[2]
        assert lengths[1] != lengths[3]
        assert lengths[::2] != lengths[1::2]


def test_example_batches_of_groups_have_several_sentences():
    """Tracing takes a size of 1 for a fixed one."""
    kind = "translation.number_words:number_words"
    dataset = build(kind, "train", samples=24, test_samples=6, merges=60, tokens=30)
    batches = [dataset.collated_batch(numbers) for numbers in dataset.example_indices((2, 1))]
    assert all(source.shape[1] > 1 for (source, _), _ in batches)


# Number words


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (70, "seventy", "siebzig"),
        (101, "one hundred one", "einhunderteins"),
        (330, "three hundred thirty", "dreihundertdreißig"),
        (21_001, "twenty-one thousand one", "einundzwanzigtausendeins"),
        (101_017, "one hundred one thousand seventeen", "einhunderteintausendsiebzehn"),
        (1_000_000, "one million", "eine Million"),
        (2_000_600, "two million six hundred", "zwei Millionen sechshundert"),
    ],
)
def test_numbers_in_words(number, english, german):
    assert (in_english(number), in_german(number)) == (english, german)


def test_no_two_numbers_have_the_same_words():
    assert len({in_german(n) for n in range(10_000)}) == len({in_english(n) for n in range(10_000)}) == 10_000


def test_number_words_are_the_same_each_time_and_their_splits_share_no_sentence():
    sets = {
        split: build("translation.number_words:number_words", split, samples=300, test_samples=100)
        for split in ("train", "test")
    }
    texts = {split: [found.source_text(i) for i in range(len(found))] for split, found in sets.items()}
    again = build("translation.number_words:number_words", "train", samples=300)
    assert texts["train"] == [again.source_text(i) for i in range(300)]
    assert not set(texts["train"]) & set(texts["test"])
    assert len({found.fingerprint() for found in (*sets.values(), again)}) == 1
    unknown = [i for i in range(100) if UNKNOWN in sets["test"].source_numbers(i)]
    assert not unknown


# Message catalogues


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_catalogue_is_read_as_pythons_own_reader_reads_it(tmp_path, order):
    messages = {
        "Open the file": "Die Datei öffnen",
        "menu\x04Close the file": "Die Datei schließen",
        "%d file was found\x00%d files were found": "%d Datei gefunden\x00%d Dateien gefunden",
    }
    write_mo(tmp_path / "x.mo", messages, "UTF-8", order)
    with (tmp_path / "x.mo").open("rb") as file:
        theirs = gettext.GNUTranslations(file)
    found = dict(read_mo(tmp_path / "x.mo"))
    assert found["Open the file"] == theirs.gettext("Open the file") == "Die Datei öffnen"
    assert found["Close the file"] == theirs.pgettext("menu", "Close the file")
    assert found["%d file was found"] == "%d Datei gefunden"
    assert len(found) == 3


def test_a_catalogue_in_another_encoding_is_read(tmp_path):
    write_mo(tmp_path / "x.mo", {"Close it": "Schließen"}, "ISO-8859-1")
    assert read_mo(tmp_path / "x.mo") == [("Close it", "Schließen")]


@pytest.mark.parametrize("cut", [0, 3, 20, 40, 70, -5])
def test_a_damaged_catalogue_is_refused_by_name(tmp_path, cut):
    content = write_mo(tmp_path / "x.mo", {"Open the file": "Die Datei öffnen"})
    (tmp_path / "x.mo").write_bytes(content[:cut])
    with pytest.raises(DataError, match=r"x\.mo: not a message catalogue"):
        read_mo(tmp_path / "x.mo")


def test_a_file_that_is_no_catalogue_and_wrong_letters_are_refused(tmp_path):
    (tmp_path / "x.mo").write_bytes(b"GIF89a" + bytes(100))
    with pytest.raises(DataError, match="Bad magic number"):
        read_mo(tmp_path / "x.mo")
    content = write_mo(tmp_path / "x.mo", {"Close it": "Schließen"}, "ISO-8859-1")
    (tmp_path / "x.mo").write_bytes(content.replace(b"ISO-8859-1", b"UTF-8     "))
    with pytest.raises(DataError, match="not a message catalogue .* .'utf-8' codec"):
        read_mo(tmp_path / "x.mo")


def test_a_catalogue_that_names_any_codec_of_pythons_is_read_or_refused_in_words(tmp_path):
    refused = []
    for charset in sorted({*encodings.aliases.aliases.values(), "undefined", "idna", "punycode", "nothing"}):
        description = f"Content-Type: text/plain; charset={charset}\n"
        write_mo(tmp_path / "x.mo", {"": description, "Close it": "Schließen"}, None)
        try:
            read_mo(tmp_path / "x.mo")
        except DataError:
            refused.append(charset)
    assert {"undefined", "hex_codec", "nothing", "ascii"} <= set(refused)


def test_messages_are_cleaned():
    assert clean("_Save  the\n<b>file</b>") == "Save the file"
    assert clean("the_name of __init__") == "the_name of __init__"
    pairs = [
        ("Open the _file", "Die Datei ö_ffnen"),
        ("Open the file", "Die Datei anders öffnen"),
        ("OK", "OK"),
        ("--all take all files", "--all alle Dateien nehmen"),
        ("%s: %d (%d)", "%s: %d von %d"),
    ]
    assert clean_pairs(pairs) == [("Open the file", "Die Datei ö_ffnen")]


def test_catalogues_are_split_by_hash_and_scored_against_their_own_text(tmp_path):
    messages = {f"Open the file {in_english(n)}": f"Datei {in_german(n)} öffnen." for n in range(60)}
    write_mo(tmp_path / "LC_MESSAGES" / "x.mo", messages)
    sets = [
        build("translation.catalogues:catalogues", split, path=str(tmp_path), test_fraction=0.2, merges=50)
        for split in ("train", "test")
    ]
    texts = [{found.source_text(i) for i in range(len(found))} for found in sets]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == set(messages)
    assert sets[1].reference(0) == messages[sets[1].source_text(0)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.mo file"):
        build("translation.catalogues:catalogues", "train", path=str(tmp_path / "empty"))


# Text files


def write_pair(folder: Path, name: str, source: str, target: str) -> None:
    (folder / f"{name}.en").write_text(source)
    (folder / f"{name}.de").write_text(target)


def corpus(folder: Path) -> Path:
    write_pair(folder, "train", "the low@@ er house\nthe house\n", "das nied@@ ri@@ ge Haus\ndas Haus\n")
    write_pair(folder, "test", "the house\n", "das Haus\n")
    return folder


def test_text_in_pieces_is_read_with_the_vocabulary_of_its_training_part(tmp_path):
    train, test = (
        build("translation.text_files:translation", split, path=str(corpus(tmp_path)))
        for split in ("train", "test")
    )
    assert (len(train), len(test)) == (2, 1)
    assert train.vocabulary == test.vocabulary == len(SPECIAL) + 9
    assert train.reference(0) == "das niedrige Haus"


def test_text_is_encoded_with_the_files_that_subword_nmt_writes(tmp_path):
    corpus(tmp_path)
    write_pair(tmp_path, "train", "low lower\n", "low low\n")
    (tmp_path / "codes").write_text("#version: 0.2\nl o\nlo w</w>\n")
    (tmp_path / "vocab").write_text("low 3\nlo@@ 1\nw@@ 1\ne@@ 1\nr 1\n")
    train = build(
        "translation.text_files:translation", "train", path=str(tmp_path), codes="codes", vocabulary="vocab"
    )
    assert train.source_numbers(0) == [4, 5, 6, 7, 8, END]


def test_codes_are_learned_on_the_spot(tmp_path):
    learned = build(
        "translation.text_files:translation",
        "test",
        path=str(corpus(tmp_path)),
        merges=30,
        vocabulary_size=20,
    )
    assert learned.vocabulary <= 20
    assert UNKNOWN not in learned.source_numbers(0)


def test_a_reference_and_long_pairs(tmp_path):
    (corpus(tmp_path) / "raw.de").write_text("Das Haus!\n")
    assert (
        build("translation.text_files:translation", "test", path=str(tmp_path), reference="raw.de").reference(
            0
        )
        == "Das Haus!"
    )
    assert len(build("translation.text_files:translation", "train", path=str(tmp_path), longest=2)) == 1
    with pytest.raises(DataError, match=r"data\.longest: found 1, but the shortest of 2 pairs has 2 tokens"):
        build("translation.text_files:translation", "train", path=str(tmp_path), longest=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.de", b"das\n", r"train\.en, line 2: it has no partner: train\.de has 1 lines, train\.en 2;"),
        ("train.de", b"", r"train\.de: found an empty file, expected sentences, one a line"),
        ("train.de", b"das\n\n", r"train\.de, line 2: found an empty line"),
        (
            "train.de",
            "das\nschön\n".encode("latin-1"),
            r"train\.de, line 2: byte 7 is not UTF-8 \(0xf6\).*iconv -f ISO-8859-1 .* set data\.path",
        ),
        ("train.de", "das\n".encode("utf-16"), r"train\.de, line 1: .*iconv -f UTF-16 -t UTF-8"),
        ("train.de", None, r"train\.de: no such file; expected sentences"),
        ("vocab", b"x\ny\n", r"target tokens are not in the vocabulary of 6; is data\.vocabulary of another"),
        ("raw.de", b"eins\nzwei\n", r"raw\.de, line 2: found 2 lines, but the test set has 1 sentences"),
    ],
)
def test_bad_files_are_refused_with_file_line_and_remedy(tmp_path, name, content, message):
    corpus(tmp_path)
    (tmp_path / "vocab").write_text("das\nHaus\nthe\nhouse\n")
    (tmp_path / "raw.de").write_text("Das Haus!\n")
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)

    def build_both():
        for split in ("train", "test"):
            build(
                "translation.text_files:translation",
                split,
                path=str(tmp_path),
                vocabulary="vocab",
                reference="raw.de",
            )

    with pytest.raises(DataError, match=message):
        build_both()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "translation.number_words:number_words",
            {"limit": 3},
            r"data\.limit: found 3, expected a number from 20",
        ),
        (
            "translation.number_words:number_words",
            {"sentences": 3, "tokens": 9},
            "found both sentences and tokens",
        ),
        (
            "translation.number_words:number_words",
            {"tokens": 0},
            r"data\.tokens: found 0, expected at least 1",
        ),
        ("translation.number_words:number_words", {"merges": 0}, r"data\.merges: found 0"),
        (
            "translation.number_words:number_words",
            {"vocabulary_size": 4},
            r"data\.vocabulary_size: found 4, expected at least 5",
        ),
        ("translation.catalogues:catalogues", {"test_fraction": 1.5}, r"data\.test_fraction: found 1.5"),
        (
            "translation.catalogues:catalogues",
            {"path": "nowhere"},
            "nowhere: no such folder, expected message catalogues",
        ),
        (
            "translation.text_files:translation",
            {"path": ".", "codes": "x", "merges": 3},
            "found both codes and merges",
        ),
    ],
)
def test_wrong_options_are_refused(kind, options, message):
    with pytest.raises(DataError, match=message):
        build(kind, "train", **options)
