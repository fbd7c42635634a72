"""Every verb of DataProto against the same operation on a plain list of rows."""

from __future__ import annotations

import copy
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean
from tests.protocol.batches import EXAMPLES, assert_rows, batches, rows_of


def small() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(12).view(6, 2), "score": torch.arange(6.0)},
        {"prompt_id": ["p", "q", "p", "r", "q", "p"], "extra": [[1], [2, 3], [], [4], None, "x"]},
        {"step": 3},
    )


class TestBuilding:
    def test_tensors_are_kept_and_lists_and_arrays_become_object_columns(self) -> None:
        ids = torch.arange(2)
        columns = {"ids": ids, "a": [[1, 2], [3, 4]], "b": np.array([1, 2]), "c": np.ones((2, 3))}
        data = DataProto.from_single_dict(columns, {"step": 1})
        assert data.batch["ids"] is ids and data.meta_info == {"step": 1}
        assert [data.non_tensor_batch[key].dtype for key in "abc"] == [object] * 3
        assert data.non_tensor_batch["a"].tolist() == [[1, 2], [3, 4]]
        assert type(data.non_tensor_batch["b"][0]) is int
        assert data.non_tensor_batch["c"].shape == (2,)
        assert len(data) == 2 and len(DataProto()) == len(DataProto({"a": torch.zeros(0, 3)})) == 0 and DataProto()

    @pytest.mark.parametrize(
        ("tensors", "objects", "message"),
        [
            ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, r"batch\['b'\] has 3 rows, but batch\['a'\] has 2"),
            ({"a": torch.zeros(2)}, {"x": [1]}, r"non_tensor_batch\['x'\] has 1 rows, but the tensor columns have 2"),
            ({}, {"x": [1], "y": [1, 2]}, r"non_tensor_batch\['y'\] has 2 rows, but non_tensor_batch\['x'\] has 1"),
            ({"a": torch.tensor(1)}, {}, r"batch\['a'\] must have a batch dimension"),
            ({"a": [1, 2]}, {}, r"batch\['a'\] must be a torch.Tensor, got list"),
            ({}, {"x": "text"}, r"non_tensor_batch\['x'\] must be a list or array"),
            ({}, {"x": {"a": 1}}, r"non_tensor_batch\['x'\] must be a list or array"),
        ],
    )
    def test_what_is_no_batch(self, tensors: dict, objects: dict, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            DataProto.from_dict(tensors, objects)

    def test_assignment_checks_rows(self) -> None:
        data = small()
        with pytest.raises(ValueError, match="has 5 rows"):
            data.batch["new"] = torch.zeros(5)
        data.batch["new"] = torch.zeros(6)
        data.non_tensor_batch["bad"] = np.empty(2, dtype=object)
        with pytest.raises(ValueError, match=r"non_tensor_batch\['bad'\] has 2 rows"):
            data[:2]


class TestColumns:
    def test_select(self) -> None:
        data = small()
        chosen = data.select(["ids"], "extra", [])
        assert chosen.batch["ids"] is data.batch["ids"]
        assert (list(chosen.batch), list(chosen.non_tensor_batch), chosen.meta_info) == (["ids"], ["extra"], {})
        everything = data.select()
        assert everything.equals(data)
        everything.meta_info["step"] = 9
        everything.batch["new"] = torch.zeros(6)
        assert data.meta_info == {"step": 3}
        assert "new" not in data.batch
        with pytest.raises(KeyError, match=r"batch has no 'nope'; there are \['ids', 'score'\]"):
            data.select(["nope"])

    def test_pop(self) -> None:
        data = small()
        popped = data.pop(["ids"], ["extra"])
        assert (list(popped.batch), list(popped.non_tensor_batch), popped.meta_info) == (["ids"], ["extra"], {})
        assert (list(data.batch), list(data.non_tensor_batch), data.meta_info) == (
            ["score"],
            ["prompt_id"],
            {"step": 3},
        )
        before = data.select()
        with pytest.raises(KeyError):
            data.pop(["score"], ["nope"])
        assert data.equals(before)

    def test_rename(self) -> None:
        data = small()
        assert data.rename(["ids", "extra"], ["input_ids", "info"]) is data
        assert list(data.batch) == ["input_ids", "score"]
        assert list(data.non_tensor_batch) == ["prompt_id", "info"]
        data.rename("score", "reward")
        data.rename(["input_ids", "reward"], ["reward", "input_ids"])
        assert data.batch["input_ids"].tolist() == small().batch["score"].tolist()
        with pytest.raises(KeyError, match="no column 'nope'"):
            data.rename("nope", "x")
        with pytest.raises(ValueError, match="two columns one name"):
            data.rename("reward", "prompt_id")
        with pytest.raises(ValueError, match="as many new names"):
            data.rename(["reward"], ["a", "b"])

    @EXAMPLES
    @given(batches(min_rows=3, max_rows=3), batches(min_rows=3, max_rows=3))
    def test_union(self, left: DataProto, right: DataProto) -> None:
        shared = {*left.batch, *left.non_tensor_batch} & {*right.batch, *right.non_tensor_batch}
        right.meta_info = {"other": 1}
        conflict = any(
            not left.select([k] * (k in left.batch), [k] * (k not in left.batch), []).equals(
                right.select([k] * (k in right.batch), [k] * (k not in right.batch), []))
            for k in shared
        )  # fmt: skip
        before = left.select()
        if conflict:
            with pytest.raises(ValueError, match="different values in the two batches of a union"):
                left.union(right)
            assert left.equals(before)
            return
        expected = [ours | theirs for ours, theirs in zip(rows_of(left), rows_of(right), strict=True)]
        assert left.union(right) is left
        assert_rows(left, expected)
        assert left.meta_info == before.meta_info | {"other": 1}

    def test_union_with_other_length_and_with_meta_only(self) -> None:
        with pytest.raises(ValueError, match="union of a batch of 6 rows with one of 2"):
            small().union(DataProto.from_dict({"new": torch.zeros(2)}))
        assert small().union(DataProto(meta_info={"epoch": 1})).meta_info == {"step": 3, "epoch": 1}
        with pytest.raises(ValueError, match=r"meta_info\['step'\]"):
            small().union(DataProto(meta_info={"step": 4}))
        assert DataProto().union(small()).equals(small())


class TestRows:
    @EXAMPLES
    @given(batches(), st.data())
    def test_picks_and_orders(self, data: DataProto, choice: st.DataObject) -> None:
        rows, size = rows_of(data), len(data)
        index = choice.draw(st.slices(7))
        assert_rows(data[index], rows[index])
        assert data[index].meta_info == data.meta_info or "nan" in repr(data.meta_info)
        picked = choice.draw(st.lists(st.integers(-size, size - 1), max_size=9)) if size else []
        for one in (picked, np.array(picked, dtype=np.int32), torch.tensor(picked, dtype=torch.int64)):
            assert_rows(data[one], [rows[row] for row in picked])
        mask = choice.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        for one in (np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool), *([mask] if mask else ())):
            assert_rows(data[one], [row for row, wanted in zip(rows, mask, strict=True) if wanted])
        order = choice.draw(st.permutations(range(size)))
        assert data.reorder(torch.tensor(order, dtype=torch.int64)) is data
        assert_rows(data, [rows[row] for row in order])

    @EXAMPLES
    @given(batches(), st.integers(1, 9), st.integers(0, 3))
    def test_parts_and_repetitions(self, data: DataProto, size: int, times: int) -> None:
        rows = rows_of(data)
        assert_rows(data.repeat(times, interleave=True), [row for row in rows for _ in range(times)])
        assert_rows(data.repeat(times, interleave=False), rows * times)
        chunks = data.chunk(size)
        assert [len(part) for part in chunks] == [len(part) for part in np.array_split(np.arange(len(data)), size)]
        assert DataProto.concat(chunks).equals(data)
        parts = data.split(size)
        assert len(parts) == -(-len(rows) // size)
        for number, part in enumerate(parts):
            assert_rows(part, rows[number * size : (number + 1) * size])
        if rows:
            padded, pad_size = data.pad_to_divisor(size)
            assert len(padded) % size == 0 and 0 <= pad_size < size
            assert_rows(padded, (rows * (1 + size))[: len(padded)])
            assert padded.unpad(pad_size).equals(data)

    @pytest.mark.parametrize("index", [6, -7, [0, 6], [True] * 5, [0.5], [[0], [1]]])
    def test_bad_index(self, index: object) -> None:
        with pytest.raises(IndexError):
            small()[index]  # type: ignore[index]
        for order in ([0, 1, 2], [0, 0, 1, 2, 3, 4]):
            with pytest.raises(ValueError, match="each of the 6 rows once"):
                small().reorder(order)

    def test_one_row(self) -> None:
        data = small()
        item = data[-2]
        assert item.batch["ids"].tolist() == [8, 9]
        assert item.non_tensor_batch == {"prompt_id": "q", "extra": None}
        assert [row.batch["score"].item() for row in data] == [0, 1, 2, 3, 4, 5]

    def test_slices_share_memory_and_picks_do_not(self) -> None:
        data = small()
        data[1:3].batch["score"][0] = 100
        data[[1, 2]].batch["score"][1] = 200
        assert data.batch["score"].tolist() == [0, 100, 2, 3, 4, 5]


class TestConcat:
    def test_widths_are_padded_with_zero_or_the_given_value(self) -> None:
        parts = [
            DataProto.from_dict({"ids": torch.ones(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3).bool()}),
            DataProto.from_dict({"ids": torch.full((1, 5), 2), "mask": torch.ones(1, 5).bool()}),
        ]
        joined = DataProto.concat(parts, fill={"ids": 7})
        assert joined.batch["ids"].tolist() == [[1, 1, 1, 7, 7], [1, 1, 1, 7, 7], [2, 2, 2, 2, 2]]
        assert joined.batch["mask"].tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
        assert DataProto.concat(parts).batch["ids"][0].tolist() == [1, 1, 1, 0, 0]

    def test_meta_info(self) -> None:
        metas = [
            {"step": 1, "a": torch.ones(2), "metrics": {"loss": Mean(4.0, 2.0), "peak": Max(1.0)}},
            {"step": 1, "b": 2, "a": torch.ones(2), "metrics": {"loss": Mean(1.0, 3.0)}},
        ]
        joined = DataProto.concat([DataProto({"x": torch.zeros(1)}, meta_info=meta) for meta in metas])
        assert joined.meta_info["step"] == 1
        assert joined.meta_info["b"] == 2
        assert joined.meta_info["metrics"] == {"loss": Mean(5.0, 5.0), "peak": Max(1.0)}

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (DataProto({"y": torch.zeros(1)}), "must have the same columns"),
            (DataProto({"x": torch.zeros(1, 2).int()}), "is torch.float32 on cpu, that of number 1 torch.int32"),
            (DataProto({"x": torch.zeros(1, 2, 2)}), r"rows of shape \(2,\), that of number 1 \(2, 2\)"),
            (DataProto({"x": torch.zeros(1)}), r"rows of shape \(2,\), that of number 1 \(\)"),
            (DataProto({"x": torch.zeros(1, 2)}, {"o": [1]}), "must have the same columns, but non_tensor_batch"),
            (DataProto({"x": torch.zeros(1, 2)}, meta_info={"step": 2}), r"meta_info\['step'\] is 1 in one batch"),
        ],
    )
    def test_what_does_not_go_together(self, other: DataProto, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DataProto.concat([DataProto({"x": torch.zeros(1, 2)}, meta_info={"step": 1}), other])
        with pytest.raises(ValueError, match="at least one batch"):
            DataProto.concat([])


class TestGroups:
    @EXAMPLES
    @given(batches(), st.data())
    def test_group_by(self, data: DataProto, choice: st.DataObject) -> None:
        keys = choice.draw(st.lists(st.sampled_from("pqr"), min_size=len(data), max_size=len(data)))
        data.non_tensor_batch["key"] = np.fromiter(keys, dtype=object, count=len(keys))
        data.batch["bucket"] = torch.tensor([ord(key) for key in keys], dtype=torch.int64)
        groups, buckets = data.group_by("key"), data.group_by("bucket")
        assert list(groups) == [chr(bucket) for bucket in buckets] == list(dict.fromkeys(keys))
        for (value, group), bucket in zip(groups.items(), buckets.values(), strict=True):
            assert_rows(group, wanted := [row for row in rows_of(data) if row["key"] == value])
            assert_rows(bucket, wanted)
        with pytest.raises(KeyError, match="no column 'ids' to group by"):
            small().group_by("ids")  # two-dimensional


class TestIterator:
    @EXAMPLES
    @given(batches(), st.integers(1, 9), st.integers(0, 2))
    def test_in_order(self, data: DataProto, size: int, epochs: int) -> None:
        parts = list(data.make_iterator(size, epochs))
        rows = rows_of(data)
        expected = [rows[start : start + size] for start in range(0, len(rows), size)] * epochs
        assert len(parts) == len(expected)
        for part, chunk in zip(parts, expected, strict=True):
            assert_rows(part, chunk)

    def test_shuffled(self) -> None:
        data = DataProto({"x": torch.arange(100)})

        def epochs(seed: int) -> list[list[int]]:
            parts = [part.batch["x"].tolist() for part in data.make_iterator(30, epochs=2, seed=seed)]
            assert [len(part) for part in parts] == [30, 30, 30, 10] * 2
            return [list(chain(*parts[:4])), list(chain(*parts[4:]))]

        first, second = epochs(1)
        assert sorted(first) == sorted(second) == list(range(100))
        assert first != second
        assert epochs(1) == [first, second]
        assert epochs(2) != [first, second]

    def test_bad_sizes(self) -> None:
        with pytest.raises(ValueError, match="mini_batch_size must be at least 1, got 0"):
            small().make_iterator(0)
        with pytest.raises(ValueError, match="between 0 and the batch's 6 rows, got 7"):
            small().unpad(7)


class TestEquality:
    def test_every_part_counts(self) -> None:
        data, copied = small(), copy.deepcopy(small())
        assert copied.equals(data) and copy.copy(data).equals(data)
        copied.batch["score"].zero_()
        assert not copied.equals(data) and data.equals(small())
        copied = copy.deepcopy(data)
        copied.non_tensor_batch["extra"][0].append(5)
        assert not copied.equals(data) and data.equals(small()), "deep copies share nothing"
        copied = copy.deepcopy(data)
        copied.non_tensor_batch["extra"][0] = [1.0]
        assert not copied.equals(data), "a number of another type"
        copied.non_tensor_batch["extra"][0] = [1]
        copied.batch["ids"] = copied.batch["ids"] + 1
        assert not copied.equals(data) and not data.equals(data.select(meta_info_keys=[]))
        assert copy.deepcopy(small().to("meta")).batch["score"].device.type == "meta"

    def test_numbers(self) -> None:
        nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
        assert DataProto({"x": nan}).equals(DataProto({"x": nan.clone()}))
        assert DataProto({"x": torch.cat([nan, zero])}).equals(DataProto({"x": torch.cat([-nan, -zero])}))
        for other in (zero + 1e-30, nan, zero.double()):
            assert not DataProto({"x": zero}).equals(DataProto({"x": other}))
