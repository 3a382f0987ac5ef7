"""The update on a GPU, in this process: `pytest -m gpu -n0 tests/update/test_gpu.py`. Nothing is downloaded."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.update import verl_actor
from verl_ext.update import SHARE_MARK, SKIP_MARK, engine, pack
from verl_ext.update.engine import log_probs

sys.path.append(str(Path(__file__).parents[2] / "scripts/bench"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not verl_actor.GPU, reason="there is no GPU")]
COUNT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    verl_actor.write_random_model(folder, "qwen2.5-0.5b")
    return folder


@pytest.fixture(scope="module", params=["fsdp2", "fsdp"])
def actor(model, request):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="0")
    os.environ["DIST_INIT_METHOD"] = f"file://{model.parent}/group"
    strategy = f"actor_rollout_ref.actor.strategy={request.param}"
    return verl_actor.Actor(str(model), strategy, sgd=True)  # Adam's step needs more memory than any way


def batch(seed):
    """Groups of 8 with GSM8K's lengths, half of them live; some answers have 1 and 2 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(*of, (COUNT,), generator=draw).tolist() for of in ((68, 204), (53, 160))]
    lengths[1][:2] = [1, 2]
    live = [row % 16 < 8 for row in range(COUNT)]
    return verl_actor.random_rows(COUNT, live, seed=seed, nested=True, group=8, lengths=lengths)


@pytest.mark.parametrize(("heads", "size"), [((14, 2), 64), ((12, 2), 128)])
def test_flash_attention_is_as_exact_as_bf16(heads, size, record_property):
    """Output and gradients against fp32, which is computed by a loop over the segments."""
    data = batch(0).to("cuda")
    taken, _, plan = pack.pack(data)
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs = [draw(1, number, len(taken), size).bfloat16() for number in (*heads, heads[1])]
    slope = draw(1, len(taken), heads[0], size).bfloat16()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        values = [x.to(dtype).requires_grad_() for x in inputs]
        assert pack.flash_supports("cuda", dtype, size, size) == (dtype == torch.bfloat16)
        found, _ = pack.attend(None, *values, None, plan=plan, scaling=size**-0.5)
        gradients = torch.autograd.grad((found * slope.to(dtype)).sum(), values)
        results.append([found.detach(), *gradients])
    errors = [float((one.float() - exact).abs().max() / exact.abs().max()) for exact, one in zip(*results, strict=True)]
    record_property("largest relative error of output and gradients", str(errors))
    assert max(errors) < 0.02


def test_log_probs_are_those_of_fp32():
    draw = torch.Generator("cuda").manual_seed(0)
    logits = (5 * torch.randn(2000, 151936, device="cuda", generator=draw)).bfloat16().requires_grad_()
    labels = torch.randint(151936, (2000,), device="cuda", generator=draw)
    usual = logits.detach().float().requires_grad_()
    expected = usual.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    expected.sum().backward()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = log_probs(1.0 * logits, labels, inplace_backward=True)
    found.sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits.grad.float(), usual.grad, atol=1e-5, rtol=0.01)


def test_gradients_differ_from_verl_no_more_than_other_micro_batches(actor, capsys):
    """The limit is twice the distance that verl's own smaller micro-batches make."""
    usual = {"mini_batch_size": COUNT, "global_batch_size": COUNT, "epochs": 1, "use_dynamic_bsz": True}
    ways: dict[str, tuple[tuple[str, ...], int]] = {"smaller": ((), 1024)}
    ways |= {"skip": ((SKIP_MARK,), 4096), "share": ((SHARE_MARK,), 4096), "both": ((SKIP_MARK, SHARE_MARK), 4096)}

    def gradient(marks, limit):
        with engine.computing(actor.engine, share=False):  # one function of log-probabilities
            return actor.train(batch(1), {}, *marks, **usual, max_token_len_per_gpu=limit)["gradients"][0]

    reference = gradient((), 4096)
    distances = {way: float((gradient(*how) - reference).norm() / reference.norm()) for way, how in ways.items()}
    with capsys.disabled():
        sys.stdout.write(f"\ndistance of the gradients from verl's: {distances}\n")
    assert max(distances.values()) <= 2 * distances["smaller"] < 0.1


@pytest.mark.parametrize("actor", ["fsdp2"], indirect=True)
def test_each_setting_makes_the_update_faster(actor, capsys):
    """In turns, with one function of log-probabilities; `plain` is verl without flash-attn."""
    import bench_update

    sizes = ["--rows", "256", "--tokens", "4096", "--widths", "204", "160", "--rounds", "3", "--shares", "0.5"]
    with capsys.disabled():
        [row] = bench_update.main(sizes, actor)
    assert row.seconds["both"] < row.seconds["skip"] < row.seconds["verl"]
    assert row.seconds["share"] < row.seconds["verl"] < row.seconds["plain"]
    assert max(row.memory["share"], row.memory["both"]) < row.memory["verl"]
