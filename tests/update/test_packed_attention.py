"""Packed rows: attention is that of each row alone, by the loop and by a kernel. Log-probabilities are log_softmax."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.update import updates
from verl_ext.errors import IntegrationError
from verl_ext.update import engine, pack, split
from verl_ext.update.log_probs import log_probs


def variable_lengths(query, key, value, query_ends, key_ends, most_queries, most_keys, *options, scale):
    """What `torch.ops.aten._flash_attention_forward` computes: segments, causal and aligned at the end."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert (most_queries, most_keys) == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    assert options == (0.0, True, False)  # dropout, causal, debug
    assert query_ends[-1] == len(query)
    assert key_ends[-1] == len(key) == len(value)
    out = []
    for begin, end, first, last in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        places = torch.arange(int(last - first))
        seen = places <= places[-int(end - begin) :, None]
        parts = (x.transpose(0, 1) for x in (query[begin:end], key[first:last], value[first:last]))
        out.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out), *[None] * 4


class Packed(NamedTuple):
    rows: list[list[int]]
    """Of each row the places of its tokens in the packed sequence, without its last one."""
    taken: torch.Tensor
    predict: torch.Tensor
    plan: pack.Plan
    data: object


def packed(seed: int) -> Packed:
    """Rows of drawn lengths, in groups of some rows to a prompt."""
    draw = random.Random(seed)
    count, group = draw.randint(1, 20), draw.randint(1, 9)
    lengths = (
        [draw.randint(1, 30) for _ in range(count)],
        [draw.choice([1, 1, 2, draw.randint(3, 40)]) for _ in range(count)],
    )
    data = updates.rows(count, [True] * count, seed=seed, nested=seed % 2 == 0, lengths=lengths, group=group)
    read, places, end = split.row_lengths(data, share=True), {}, 0
    for members in read.by_prompt():
        prompt = [*range(end, end + read.prompt[members[0]])]
        end += len(prompt)
        for row in members:
            size = read.answer[row] - 1
            places[row] = [*prompt, *range(end, end + size)]
            end += size
    return Packed([places[row] for row in range(count)], *pack.pack(data), data)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in (0, 50, 100, 150)], ids=str)
@pytest.mark.parametrize("way", ["loop", "kernel"])
def test_output_and_gradients_are_those_of_each_row_alone(monkeypatch, way, seeds):
    monkeypatch.setattr(pack, "flash", lambda *_: way == "kernel")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", variable_lengths)
    for seed in seeds:
        rows, taken, _, plan, _ = packed(seed)
        heads, grouped = random.Random(seed).choice([(4, 2), (14, 2), (12, 2), (3, 3), (6, 1)])
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, generator=generator) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        inputs = [drawn(1, number, len(taken), 8).requires_grad_() for number in (heads, grouped, grouped)]
        slope = drawn(len(rows), 80, heads, 8)
        found, _ = pack.attend(None, *inputs, None, plan=plan, scaling=0.3)
        results = []
        for alone in (False, True):
            outputs = []
            for row in rows:
                if alone:
                    parts = (x[:, :, row] for x in inputs)
                    own = scaled_dot_product_attention(*parts, is_causal=True, scale=0.3, enable_gqa=True)
                    outputs.append(own[0].transpose(0, 1))
                else:
                    outputs.append(found[0, row])
            loss = sum((output * slope[row, : len(output)]).sum() for row, output in enumerate(outputs))
            results.append([torch.cat(outputs), *torch.autograd.grad(loss, inputs)])
        for one, other in zip(*results, strict=True):
            # The gradients of a row of one token are 0, and on some processors what rounding leaves of 0.
            assert (one - other).abs().max() <= 1e-12 * max(1.0, other.abs().max())


def test_the_packed_sequence_is_that_of_the_rows_and_each_token_of_an_answer_is_predicted():
    for seed in range(20):
        rows, taken, predict, _, data = packed(seed)
        sequence, answers = data["input_ids"].values()[taken], split.row_lengths(data, share=False).answer
        for places, whole in zip(rows, data["input_ids"].unbind(), strict=True):
            assert sequence[places].tolist() == whole[:-1].tolist()
        # The token before the first of an answer is the prompt's last.
        wanted = [place for places, size in zip(rows, answers, strict=True) for place in places[len(places) - size :]]
        assert predict.tolist() == wanted


def inputs(plan, heads=(4, 2), size=64, **options):
    count = int(plan.query_ends[-1])
    return [torch.ones(1, number, count, size, **options).requires_grad_() for number in (*heads, heads[1])]


@pytest.mark.parametrize("heads", [(14, 2), (12, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_s_kernel_takes_the_plan_forward_and_backward(heads, dtype):
    plan = packed(2).plan
    values = inputs(plan, heads, device="meta", dtype=dtype)
    plan = plan._replace(**{name: part.to("meta") for name, part in plan._asdict().items() if torch.is_tensor(part)})
    found, _ = pack.attend(None, *values, None, plan=plan, scaling=0.1, dropout=0.1)
    assert found.shape == (1, values[0].shape[2], heads[0], 64)
    found.sum().backward()
    assert [x.grad.shape for x in values] == [x.shape for x in values]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"size": 60}, "60"),
        ({"size": 264}, "264"),
        ({"of_values": 128}, "64"),
        ({"card": (7, 5)}, "bfloat16"),
        ({"hip": "6.4"}, "bfloat16"),
    ],
)
def test_what_torch_s_kernel_cannot_compute_is_said_once_on_a_gpu(monkeypatch, caplog, changed, why):
    case = {"dtype": torch.bfloat16, "size": 64, "of_values": 64, "card": (8, 0), "hip": None} | changed
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: case["card"])
    monkeypatch.setattr("torch.version.hip", case["hip"])
    pack.flash.cache_clear()
    for _ in range(2):
        assert pack.flash("cuda", case["dtype"], case["size"], case["of_values"]) == (why is None)
    pack.flash.cache_clear()
    assert [why in record.getMessage() for record in caplog.records] == [True] * (why is not None)
    assert not pack.flash("cpu", torch.bfloat16, 64, 64)


def test_queries_in_fp32_are_cast_under_autocast():
    """As in transformers: a norm of the queries may return fp32, which torch's kernel does not take."""
    plan = packed(2).plan
    query, key, value = inputs(plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = pack.attend(None, query, key.bfloat16(), value.bfloat16(), None, plan=plan)
    assert found.dtype == torch.bfloat16


def test_dropout_of_the_attention_is_that_of_the_model():
    plan = packed(2).plan
    values = inputs(plan)
    usual, dropped = (pack.attend(None, *values, None, plan=plan, dropout=rate)[0] for rate in (0.0, 0.5))
    torch.testing.assert_close(usual, values[0].transpose(1, 2))
    assert (dropped - usual).abs().max() > 0.1


@pytest.mark.parametrize("needs", [{"plan": None}, {"sliding_window": 64}, {"s_aux": torch.ones(4)}])
def test_a_model_that_needs_more_than_a_plan_is_refused(needs):
    plan = packed(2).plan
    with pytest.raises(IntegrationError, match="share_prompts=False"):
        pack.attend(None, *inputs(plan), None, **{"plan": plan, **needs})


def example(dtype, tokens=1100, words=300):
    random = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(tokens, words, generator=random)).to(dtype).requires_grad_()
    return logits, torch.randint(words, (tokens,), generator=random), torch.randn(tokens, generator=random)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_log_softmax_in_fp32_and_the_gradient_is_written_over_the_logits_if_asked(dtype, inplace):
    logits, labels, slope = example(dtype)
    given = 1.0 * logits
    usual = logits.detach().float().requires_grad_()
    expected = usual.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    expected.backward(slope)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = log_probs(given, labels, inplace)
    found.backward(slope)
    assert found.dtype == torch.float32
    assert torch.equal(given, logits) != inplace
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-6)
    rounding = torch.finfo(dtype).eps + 4e-6  # the second is that of an exponential of fp32
    torch.testing.assert_close(logits.grad.float(), usual.grad, atol=1e-6, rtol=rounding)


def test_a_second_gradient_of_the_logits_that_were_written_over_raises():
    leaf, labels, slope = example(torch.float32)
    logits = 1.0 * leaf
    entropy = logits.square().sum()  # its gradient needs the logits, and comes after
    found = log_probs(logits, labels, True)
    with pytest.raises(RuntimeError, match="inplace"):
        (found @ slope + entropy).backward()
    found = log_probs(1.0 * leaf, labels, True)
    found.backward(slope, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        found.backward(slope)


@pytest.mark.parametrize("package", [None, "flash_attn", "torch_npu"])
def test_a_marked_pass_without_a_kernel_leaves_verl_s_own_function(monkeypatch, package):
    from verl.workers.engine.fsdp import transformer_impl

    usual = transformer_impl.logprobs_from_logits
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    monkeypatch.setattr(engine, "find_spec", lambda name: name == package or None)
    with engine.computing(SimpleNamespace(module=model), share=False):
        assert (transformer_impl.logprobs_from_logits is usual) == (package is not None)
        assert model.config._attn_implementation == "sdpa"
    assert transformer_impl.logprobs_from_logits is usual


@pytest.mark.parametrize(("apart", "fails"), [(0.0, False), (0.03, False), (0.3, True)])
def test_a_change_of_every_token_beyond_bf16_s_rounding_is_refused(apart, fails):
    whole = -torch.rand(200)
    excess = engine.excess_of(whole + apart, whole, whole, torch.finfo(torch.bfloat16).eps)
    assert (float(excess) > engine.FACTOR) == fails
