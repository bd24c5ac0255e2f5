"""Random numbers by position, and text whose batches are a pure function of (seed, step, slice)."""

import hashlib
import sysconfig
from pathlib import Path

import grammar
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import random
from common.data.text import lm_batch, load_text, mlp_batch, rank_slice
from common.errors import UsageError

TEXT = np.frombuffer(bytes(range(256)) * 20, np.uint8)
U64 = st.integers(0, 2**64 - 1)


def test_mix_gives_splitmix64s_published_numbers():
    state = np.arange(1, 4, dtype=np.uint64) * np.uint64(random.GOLDEN)  # the generator seeded with 0
    assert [hex(x) for x in random.mix(state)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize(
    ("seed", "stream", "index", "bits", "uniform"),
    [  # printed by cpp/include/fived/math/random.hpp
        (0, 0, 0, 5197578548964807871, 0.28176129772258496),
        (0, 7, 1000000007, 13265655628568079641, 0.71913263259690352),
        (1, 7, 1, 9391409690812996836, 0.50910933947404347),
        (123456789, 7, 0, 11100404330844779939, 0.60175412454847055),
        (2**64 - 1, 0, 1000000007, 18228546351285505851, 0.98817147776582293),
    ],
)
def test_numbers_are_those_of_the_cpp(seed, stream, index, bits, uniform):
    assert random.bits(seed, stream, index).tolist() == [bits]
    assert random.uniform(seed, stream, index).tolist() == [uniform]


@settings(deadline=None, max_examples=50)
@given(U64, U64, st.integers(0, 2**40), st.integers(1, 70), st.data())
def test_a_part_is_what_the_whole_has_there(seed, stream, start, count, data):
    lo = data.draw(st.integers(0, count - 1))
    hi = data.draw(st.integers(lo + 1, count))
    index = np.arange(start, start + count)
    for make in (random.bits, random.uniform, random.normal):
        whole = make(seed, stream, index)
        assert np.array_equal(make(seed, stream, index[lo:hi]), whole[lo:hi])
        assert np.array_equal(make(seed, stream, index.reshape(1, -1, 1)).ravel(), whole)
        assert make(seed, stream, int(index[lo]))[0] == whole[lo]


def test_normals_are_normal():
    x = random.normals(1, 2, 100_000)
    assert np.array_equal(x[70_000:], random.normal(1, 2, np.arange(70_000, 100_000)))  # across chunks
    u = random.uniform(1, 2, [14, 15])
    assert x[7] == np.sqrt(-2 * np.log(1 - u[0])) * np.cos(2 * np.pi * u[1])
    moments = [np.mean(x**k) for k in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=0.05)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(x, random.normals(1, 3, 100_000))[0, 1]) < 0.02


def test_streams_of_names_differ():
    names = [f"layers.{i}.{part}" for i in range(50) for part in ("weight", "bias")]
    assert len({random.stream_of(name) for name in names}) == 100
    assert random.stream_of("abc") == 0xEACF018FBF1678BA  # SHA-256 of "abc" starts ba7816bf 8f01cfea


def test_default_text_is_the_standard_library(monkeypatch):
    monkeypatch.delenv("FIVED_TEXT")
    text = load_text()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
    content = b"".join(file.read_bytes() for file in files)
    assert text.train.tobytes() + text.validation.tobytes() == content
    assert len(text.train) == len(content) * 9 // 10
    assert b"import" in text.validation.tobytes()


def test_the_text_of_the_tests_is_the_same_everywhere():
    known = "6cb662011bbaf9273250391b7adcc2c53b21cd7212b38167fa766a77f81249c6"
    assert hashlib.sha256(grammar.text(0)).hexdigest() == known


def test_file_and_folder(tmp_path):
    first, second = bytes(range(256)) * 4, b"\xff" * 1003
    for name, content in {
        "b/a.txt": first, "b.txt": second, ".hidden": b"no", ".git/config": b"no", "b/.x/y": b"no"
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    text = load_text(tmp_path)
    everything = text.train.tobytes() + text.validation.tobytes()
    assert everything == second + first  # "b.txt" sorts before "b/a.txt"
    assert (len(text.train), text.name) == (2027 * 9 // 10, tmp_path.name)
    alone = load_text(tmp_path / "b" / "a.txt")
    assert alone.train.tobytes() + alone.validation.tobytes() == first
    assert alone.name == "a.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or folder: .*data"),
        (lambda path: path.write_bytes(b""), "holds 0 bytes of text; at least 1024 are needed"),
        (lambda path: path.write_bytes(b"x" * 1023), "holds 1023 bytes"),
        (lambda path: path.mkdir(), "holds 0 bytes"),
        (lambda path: path.symlink_to(path), "no such file or folder|cannot read"),
    ],
)
def test_bad_data_gets_one_line(make, message, tmp_path):
    make(tmp_path / "data")
    with pytest.raises(UsageError, match=message) as error:
        load_text(tmp_path / "data")
    assert "\n" not in str(error.value)


def test_unreadable_data_gets_one_line(tmp_path, monkeypatch):
    file = tmp_path / "data"
    file.write_bytes(b"x" * 2000)

    def refuse(path):  # root may read a file of mode 000
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*data: Permission denied"):
        load_text(file)


def test_language_model_samples():
    tokens_BS, targets_BS = lm_batch(TEXT, seed=3, step=5, batch=7, sequence=9, lo=0, hi=7)
    assert tokens_BS.shape == targets_BS.shape == (7, 9)
    assert tokens_BS.dtype == targets_BS.dtype == torch.long
    for b in range(7):
        start = int(random.bits(3, 5, b)[0]) % (len(TEXT) - 9)
        window, padding = TEXT[start : start + 10], []
        if b == 0:  # the highest bit, and the last quarter
            window, padding = window ^ 128, [-100, -100]
        assert tokens_BS[b].tolist() == window[:-1].tolist()
        assert targets_BS[b].tolist() == window[1 : 10 - len(padding)].tolist() + padding
    assert not torch.equal(tokens_BS, lm_batch(TEXT, 3, 6, 7, 9, 0, 7)[0])
    assert not torch.equal(tokens_BS, lm_batch(TEXT, 4, 5, 7, 9, 0, 7)[0])


def test_mlp_samples():
    x_BI, targets_B = mlp_batch(TEXT, seed=3, step=5, batch=4, context=3, lo=1, hi=4, dtype=torch.float64)
    assert x_BI.shape == (3, 24)
    assert x_BI.dtype == torch.float64
    for b in range(3):
        start = int(random.bits(3, 5, b + 1)[0]) % (len(TEXT) - 3)
        for i in range(3):
            for j in range(8):
                assert x_BI[b, 8 * i + j] == (1 if TEXT[start + i] >> j & 1 else -1)
        assert targets_B[b] == TEXT[start + 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch", [1, 7, 16])
def test_ranks_see_one_global_batch(batch, size):
    slices = [rank_slice(batch, rank, size) for rank in range(size)]
    assert max(hi - lo for lo, hi in slices) - min(hi - lo for lo, hi in slices) <= 1
    for make, length in ((lm_batch, 11), (lm_batch, 1), (mlp_batch, 4)):
        whole = make(TEXT, 1, 2, batch, length, 0, batch)
        parts = [make(TEXT, 1, 2, batch, length, lo, hi) for lo, hi in slices]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_windows_reach_both_ends_and_never_beyond():
    text = TEXT[:12]
    tokens_BS, targets_BS = lm_batch(text, 0, 0, 500, 10, 1, 500)  # two windows fit
    assert {(row[0].item(), last[-1].item()) for row, last in zip(tokens_BS, targets_BS, strict=True)} == {
        (0, 10),
        (1, 11),
    }
    with pytest.raises(UsageError, match="windows of 12 bytes do not fit a text of 12; 1 to 11 do"):
        lm_batch(text, 0, 0, 1, 12, 0, 1)
    with pytest.raises(UsageError, match="samples 2 to 9 are not a part of a batch of 8"):
        mlp_batch(text, 0, 0, 8, 3, 2, 9)
