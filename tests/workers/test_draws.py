"""Random numbers of tokens: uniform, and the same wherever a row lies."""

from __future__ import annotations

import torch
from workers_testing import padded_batch, worker_batch

from ppo_lib.workers.draws import token_draws
from ppo_lib.workers.packing import JaggedRows


def by_row(batch: dict[str, torch.Tensor], seed: int = 1) -> list[list[float]]:
    rows = JaggedRows(worker_batch(batch))
    return [part.tolist() for part in token_draws(rows, seed).split(rows.response_lens)]


def test_a_token_keeps_its_number_in_any_order_of_rows_and_with_any_padding() -> None:
    batch = padded_batch(16)
    expected = by_row(batch)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert by_row({name: column[order] for name, column in batch.items()}) == [expected[row] for row in order.tolist()]
    assert by_row({name: column[3:5] for name, column in batch.items()}) == expected[3:5]
    assert by_row(padded_batch(16, left=3, right=2)) == expected


def test_numbers_are_drawn_anew_for_every_step_token_and_row() -> None:
    batch = padded_batch(16)
    first, second = by_row(batch, seed=1), by_row(batch, seed=2)
    numbers = [number for row in (*first, *second) for number in row]
    assert len(set(numbers)) == len(numbers)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    last = int(batch["attention_mask"][0].nonzero().max())
    changed["input_ids"][0, last] += 1  # one token of the first row
    after = by_row(changed)
    assert not set(after[0]) & set(first[0])
    assert after[1:] == first[1:]


def test_numbers_are_uniform_and_of_neighbours_say_nothing_of_one_another() -> None:
    drawn = torch.tensor([n for seed in range(40) for row in by_row(padded_batch(64, seed), seed) for n in row])
    assert len(drawn) > 10_000
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    assert (counts / len(drawn) - 0.05).abs().max() < 0.01
    assert abs(float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1])) < 0.03
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
