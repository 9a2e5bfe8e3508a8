"""The place in the data is exact: what a resumed loader gives is what the stopped one had not given."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch

from ppo_lib.data import ResumableDataLoader
from ppo_lib.errors import DataError


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.bad:
            raise DataError(f"some.parquet, row {index}: no good")
        return {"x": torch.tensor(index)}


def loader(size=10, batch_size=3, **options):
    return ResumableDataLoader(
        Numbers(size), batch_size, **{"shuffle": True, "seed": 7, "drop_last": True, "num_workers": 0, **options}
    )


def rows(batch):
    return batch["x"].tolist()


def flat(lists):
    return list(chain.from_iterable(lists))


def epochs(it, count):
    return [[rows(batch) for batch in it] for _ in range(count)]


def test_each_epoch_is_another_permutation_that_depends_on_seed_and_epoch_only():
    first, second = epochs(loader(batch_size=5), 2)
    for epoch in (first, second):
        assert sorted(flat(epoch)) == list(range(10))
    assert first != second
    torch.manual_seed(123)
    assert epochs(loader(batch_size=5), 2) == [first, second]
    assert epochs(loader(batch_size=5, seed=8), 1) != [first]
    assert epochs(loader(batch_size=5, shuffle=False), 2) == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]] * 2


def test_drawing_batches_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    epochs(loader(num_workers=2), 1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_last_batch_that_is_not_full_is_kept_or_left_out():
    assert [len(b) for b in epochs(loader(drop_last=True), 1)[0]] == [3, 3, 3]
    assert [len(b) for b in epochs(loader(drop_last=False), 1)[0]] == [3, 3, 3, 1]
    assert (len(loader(drop_last=True)), len(loader(drop_last=False))) == (3, 4)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("stop_after", range(9))
def test_resuming_after_any_batch_gives_the_rest(stop_after, drop_last):
    options = {"drop_last": drop_last}
    whole = flat(epochs(loader(**options), 3))
    stopped, seen = loader(**options), []
    while len(seen) < stop_after:
        for batch in stopped:
            seen.append(rows(batch))
            if len(seen) == stop_after:
                break
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = loader(**options)
    resumed.load_state_dict(state)
    rest = []
    while len(rest) < len(whole) - stop_after:
        epoch = resumed.epoch
        got = [rows(batch) for batch in resumed]
        assert got  # never an epoch without a step
        assert resumed.epoch == epoch + 1
        rest += got
    assert seen + rest == whole


def test_worker_processes_prepare_ahead_without_moving_the_place():
    whole = epochs(loader(size=40, num_workers=0), 1)[0]
    ahead = loader(size=40, num_workers=2)
    for batch in ahead:
        assert rows(batch) == whole[0]
        break
    assert ahead.state_dict()["rows_seen"] == 3
    resumed = loader(size=40, num_workers=0)
    resumed.load_state_dict(ahead.state_dict())
    assert [rows(batch) for batch in resumed] == whole[1:]


def test_a_state_saved_during_the_last_batch_of_an_epoch_is_the_start_of_the_next():
    it = loader()
    for _ in it:
        state = it.state_dict()
    assert (state["epoch"], state["rows_seen"], it.epoch) == (1, 0, 1)


def test_a_loop_that_breaks_goes_on_where_it_broke():
    it, whole = loader(), epochs(loader(), 1)[0]
    got = [rows(next(iter(it)))]
    got += [rows(batch) for batch in it]
    assert got == whole


def test_the_batch_size_may_change_on_resume_and_never_leaves_an_epoch_without_batches():
    it = loader(batch_size=4)
    rows(next(iter(it)))
    state = it.state_dict()
    order = flat(epochs(loader(batch_size=1), 1)[0])
    larger = loader(batch_size=5)
    larger.load_state_dict(state)
    assert epochs(larger, 1) == [[order[4:9]]]
    assert larger.epoch == 1
    too_large = loader(batch_size=7)
    too_large.load_state_dict(state)
    assert too_large.epoch == 1
    assert epochs(too_large, 1) == [epochs(loader(batch_size=7), 2)[1]]


def test_a_state_of_other_data_or_another_order_is_refused_and_changes_nothing():
    state = {**loader().state_dict(), "rows_seen": 6}
    for other, said in (
        (loader(size=11), "number of rows was 10 when this state was saved and is 11 now"),
        (loader(seed=8), "data.seed was 7 .* and is 8 now"),
        (loader(shuffle=False), "data.shuffle was True .* and is False now"),
    ):
        before = other.state_dict()
        with pytest.raises(DataError, match=said):
            other.load_state_dict(state)
        assert other.state_dict() == before


def test_a_dataset_smaller_than_a_batch_or_empty_is_refused():
    with pytest.raises(DataError, match="has 2 rows, fewer than one batch of 3; set the batch size to 2 or less"):
        loader(size=2)
    assert len(loader(size=2, drop_last=False)) == 1
    with pytest.raises(DataError, match="empty"):
        loader(size=0, drop_last=False)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_row_that_fails_raises_its_own_error_without_a_wrapped_traceback(num_workers):
    bad = ResumableDataLoader(Numbers(6, bad=4), 2, shuffle=False, seed=0, drop_last=True, num_workers=num_workers)
    batches = iter(bad)
    assert [rows(next(batches)), rows(next(batches))] == [[0, 1], [2, 3]]
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "some.parquet, row 4: no good"


def test_an_item_without_a_row_number_gets_its_index():
    batch = next(iter(loader(shuffle=False)))
    assert batch["dataset_row"].tolist() == [0, 1, 2]


class EpochSampler:
    """Gives the same order for the same epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % 6 for i in range(6)])

    def __len__(self):
        return 6


class KeepsItsPlace:
    """Draws from a stream that goes on and on; a batch decides what comes next (a curriculum)."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for _ in range(6 - self.position % 6):
            self.position += 1
            yield (self.position - 1) * 7 % 10

    def __len__(self):
        return 6

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("sampler", [EpochSampler, KeepsItsPlace])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_sampler_gives_the_order_and_resumes(sampler, stop_after):
    whole = flat(epochs(loader(batch_size=2, sampler=sampler()), 2))
    assert len(whole) == 6
    stopped, seen = loader(batch_size=2, sampler=sampler()), []
    for batch in stopped:
        seen.append(rows(batch))
        if len(seen) == stop_after:
            break
    resumed = loader(batch_size=2, sampler=sampler())
    resumed.load_state_dict(stopped.state_dict())
    while len(seen) < 6:
        seen += [rows(batch) for batch in resumed]
    assert seen == whole


def test_a_sampler_that_keeps_its_place_needs_the_driver_to_draw():
    with pytest.raises(DataError, match="dataloader_num_workers=0"):
        loader(batch_size=2, sampler=KeepsItsPlace(), num_workers=2)


def test_a_plain_torch_sampler_resumes_in_the_order_it_had_drawn():
    def random_loader():
        return loader(8, 2, shuffle=False, sampler=torch.utils.data.RandomSampler(range(8)))

    torch.manual_seed(5)
    first = random_loader()
    batches = iter(first)
    seen = [rows(next(batches)), rows(next(batches))]
    state = json.loads(json.dumps(first.state_dict()))
    rest = [rows(batch) for batch in batches]
    torch.manual_seed(6)  # the resumed process has drawn other numbers meanwhile
    second = random_loader()
    second.load_state_dict(state)
    assert [rows(batch) for batch in second] == rest
    assert sorted(flat(seen + rest)) == list(range(8))
    assert (second.epoch_of_last_batch, second.epoch) == (0, 1)


class Learns:
    """Draws the row that it was told last, again and again."""

    def __init__(self, keeps=True):
        self.row = 0
        if keeps:
            self.state_dict, self.load_state_dict = lambda: {"row": self.row}, lambda state: vars(self).update(state)

    def __iter__(self):
        for _ in range(6):
            yield self.row

    def __len__(self):
        return 6

    def update(self, batch):
        self.row = max(batch["x"].tolist()) + 1


def drawn_and_told(prompts, steps):
    seen = []
    for batch in prompts:
        seen.append(rows(batch))
        prompts.update_sampler(batch)
        if len(seen) == steps:
            break
    return seen


def test_a_sampler_that_learns_decides_each_batch_after_the_last_and_resumes_with_what_it_knew():
    first = loader(batch_size=2, sampler=Learns())
    assert drawn_and_told(first, 2) == [[0, 0], [1, 1]]
    second = loader(batch_size=2, sampler=Learns())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn_and_told(second, 1) == [[2, 2]]


def test_a_sampler_that_learns_and_saves_nothing_starts_anew_with_a_warning(caplog):
    first = loader(batch_size=2, sampler=Learns(keeps=False))
    assert drawn_and_told(first, 2) == [[0, 0], [1, 1]]
    second = loader(batch_size=2, sampler=Learns(keeps=False))
    second.load_state_dict(first.state_dict())
    assert "Learns has update() and no state_dict()" in caplog.text
    assert drawn_and_told(second, 3) == [[0, 0]]  # what is left of the epoch


def test_a_sampler_that_must_draw_in_the_driver_does_unless_told_otherwise():
    assert loader(batch_size=2, sampler=Learns(), num_workers=None).num_workers == 0
    assert loader(batch_size=2, sampler=EpochSampler(), num_workers=None).num_workers > 0
    with pytest.raises(DataError, match="dataloader_num_workers=0"):
        loader(batch_size=2, sampler=Learns(keeps=False), num_workers=1)


def test_another_sampler_cannot_continue():
    state = loader(batch_size=2, sampler=EpochSampler()).state_dict()
    with pytest.raises(DataError, match="the sampler was EpochSampler when this state was saved and is Learns now"):
        loader(batch_size=2, sampler=Learns()).load_state_dict(state)
    with pytest.raises(DataError, match="number of rows was 6"):
        loader(batch_size=2).load_state_dict(state)


@pytest.mark.parametrize("row", [10, -1, 1.5, "a"])
def test_a_row_that_is_not_there_names_sampler_and_row(row):
    class Wild(EpochSampler):
        def __iter__(self):
            return iter([0, row])

    with pytest.raises(DataError, match=r"Wild gave .*; expected a row from 0 to 9"):
        next(iter(loader(batch_size=2, sampler=Wild())))


def test_a_sampler_whose_state_could_not_be_read_again_is_refused_at_once():
    class Odd(KeepsItsPlace):
        def state_dict(self):
            return {"draw": lambda: 3}

    with pytest.raises(DataError, match=r"the state_dict\(\) of the sampler .*Odd cannot be saved and read again"):
        loader(batch_size=2, sampler=Odd())
