"""Attention of packed rows is that of each row alone, computed segment by segment or by torch's flash attention."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from verl.utils import tensordict_utils as tu

from tests.update.verl_actor import random_rows
from verl_ext.errors import IntegrationError
from verl_ext.update import SHARE_MARK, engine, pack, split

HEADS = [(4, 2), (14, 2), (12, 2), (3, 3), (6, 1)]
"""Numbers of heads of queries, and of keys and values."""


def flash_attention_of_segments(query, key, value, query_ends, key_ends, most_queries, most_keys, *options, scale):
    """Compute what `torch.ops.aten._flash_attention_forward` does: segments, causal and aligned at their end."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert most_queries == int(query_ends.diff().max())
    assert most_keys == int(key_ends.diff().max())
    assert options == (0.0, True, False)  # dropout, causal, debug
    assert query_ends[-1] == len(query)
    assert key_ends[-1] == len(key) == len(value)
    outputs = []
    for segment in range(len(query_ends) - 1):
        queries = slice(query_ends[segment], query_ends[segment + 1])
        keys = slice(key_ends[segment], key_ends[segment + 1])
        key_numbers = torch.arange(keys.stop - keys.start)
        query_numbers = key_numbers[-(queries.stop - queries.start) :]
        visible = key_numbers <= query_numbers[:, None]
        vectors = (x.transpose(0, 1) for x in (query[queries], key[keys], value[keys]))
        output = scaled_dot_product_attention(*vectors, attn_mask=visible, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), None, None, None, None


@dataclass(frozen=True)
class PackedRows:
    """Random rows, and what `pack` makes of them."""

    places: list[list[int]]
    """Of each row the places of its tokens in the packed sequence, without its last token."""
    packed: pack.Packed
    data: object

    @property
    def size(self) -> int:
        """The tokens of the packed sequence."""
        return len(self.packed.taken)


def packed_rows(seed: int) -> PackedRows:
    """Return rows of random lengths, of which several consecutive ones share a prompt."""
    draw = random.Random(seed)
    count, group = draw.randint(1, 20), draw.randint(1, 9)
    prompt_tokens = [draw.randint(1, 30) for _ in range(count)]
    response_tokens = [draw.choice([1, 1, 2, draw.randint(3, 40)]) for _ in range(count)]
    lengths = (prompt_tokens, response_tokens)
    data = random_rows(count, [True] * count, seed=seed, nested=seed % 2 == 0, lengths=lengths, group=group)
    return PackedRows(expected_places(split.read_lengths(data, share=True)), pack.pack(data), data)


def expected_places(lengths: split.RowLengths) -> list[list[int]]:
    """Return the places of each row's tokens: the prompt, then the response without its last token."""
    places: dict[int, list[int]] = {}
    end = 0
    for rows_of_prompt in lengths.group_by_prompt(lengths.rows):
        prompt_end = end + lengths.prompt_tokens[rows_of_prompt[0]]
        prompt = list(range(end, prompt_end))
        end = prompt_end
        for row in rows_of_prompt:
            response_end = end + lengths.response_tokens[row] - 1
            places[row] = prompt + list(range(end, response_end))
            end = response_end
    return [places[row] for row in lengths.rows]


def test_example_of_the_module_is_packed_as_drawn():
    """Prompts of 3 and 2 tokens; two responses of 3 and 2 tokens to the first, one of 2 tokens to the second."""
    data = random_rows(3, [True] * 3, seed=0, nested=True, lengths=([3, 3, 2], [3, 2, 2]), group=2)
    packed = pack.pack(data)
    assert packed.taken.tolist() == [0, 1, 2, 3, 4, 9, 11, 12, 13]
    assert packed.predicting.tolist() == [2, 3, 4, 2, 5, 7, 8]
    keys_of_segments = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7], [6, 7, 8]]
    assert packed.plan.keys.tolist() == [key for keys in keys_of_segments for key in keys]
    assert packed.plan.query_ends.tolist() == [0, 3, 5, 6, 8, 9]
    assert packed.plan.key_ends.tolist() == [0, 3, 8, 12, 14, 17]
    assert (packed.plan.most_queries, packed.plan.most_keys) == (3, 5)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in (0, 50, 100, 150)], ids=str)
@pytest.mark.parametrize("uses_flash", [False, True], ids=["segments", "flash"])
def test_output_and_gradients_are_those_of_each_row_alone(monkeypatch, uses_flash, seeds):
    monkeypatch.setattr(pack, "flash_supports", lambda *_: uses_flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_of_segments)
    for seed in seeds:
        rows = packed_rows(seed)
        vectors, slopes = random_vectors(rows, seed)
        packed_output, _ = pack.attend(None, *vectors, None, plan=rows.packed.plan, scaling=0.3)
        outputs = [packed_output[0, places] for places in rows.places]
        expected = [attention_alone(vectors, places) for places in rows.places]
        for found, wanted in zip(
            with_gradients(outputs, slopes, vectors), with_gradients(expected, slopes, vectors), strict=True
        ):
            # The gradients of a row of one token are 0, and on some processors what rounding leaves of 0.
            scale = max(1.0, wanted.detach().abs().max().item())
            assert (found - wanted).abs().max() <= 1e-12 * scale


def random_vectors(rows: PackedRows, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return queries, keys and values `[1, head, token, size]`, and a gradient for each output of a row."""
    heads, key_heads = random.Random(seed).choice(HEADS)
    generator = torch.Generator().manual_seed(seed)
    vectors = []
    for number in (heads, key_heads, key_heads):
        values = torch.randn(1, number, rows.size, 8, dtype=torch.float64, generator=generator)
        vectors.append(values.requires_grad_())
    longest_row = 80
    slopes = torch.randn(len(rows.places), longest_row, heads, 8, dtype=torch.float64, generator=generator)
    return vectors, slopes


def attention_alone(vectors: list[torch.Tensor], places: list[int]) -> torch.Tensor:
    """Return the causal attention of one row, `[token, head, size]`."""
    query, key, value = (x[:, :, places] for x in vectors)
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    return output[0].transpose(0, 1)


def with_gradients(outputs: list[torch.Tensor], slopes: torch.Tensor, vectors: list[torch.Tensor]):
    """Return the outputs of all rows, and the gradients of queries, keys and values."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, output in enumerate(outputs):
        loss = loss + (output * slopes[row, : len(output)]).sum()
    return [torch.cat(outputs), *torch.autograd.grad(loss, vectors)]


@pytest.mark.parametrize("seed", range(20))
def test_each_response_token_is_predicted_by_the_token_before_it(seed):
    rows = packed_rows(seed)
    response_tokens = split.read_lengths(rows.data, share=False).response_tokens
    sequence = rows.data["input_ids"].values()[rows.packed.taken]
    expected = []
    for row, tokens in enumerate(rows.data["input_ids"].unbind()):
        places = rows.places[row]
        assert sequence[places].tolist() == tokens[:-1].tolist()
        # The prompt's last token predicts the first of the response, its last but one the last.
        expected += places[len(places) - response_tokens[row] :]
    assert rows.packed.predicting.tolist() == expected


def vectors_of_ones(plan, heads=(4, 2), size=64, **options):
    """Return queries, keys and values for a plan."""
    count = int(plan.query_ends[-1])
    return [torch.ones(1, number, count, size, **options).requires_grad_() for number in (*heads, heads[1])]


@pytest.mark.parametrize("heads", [(14, 2), (12, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_of_torch_accepts_the_plan(heads, dtype):
    """Without a GPU, the device `meta` checks the shapes of the forward and the backward pass."""
    plan = packed_rows(2).packed.plan
    vectors = vectors_of_ones(plan, heads, device="meta", dtype=dtype)
    tensors_on_meta = {name: part.to("meta") for name, part in plan._asdict().items() if torch.is_tensor(part)}
    plan = plan._replace(**tensors_on_meta)
    output, _ = pack.attend(None, *vectors, None, plan=plan, scaling=0.1, dropout=0.1)
    assert output.shape == (1, vectors[0].shape[2], heads[0], 64)
    output.sum().backward()
    assert [x.grad.shape for x in vectors] == [x.shape for x in vectors]


@pytest.mark.parametrize(
    ("changed", "named_in_warning"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"head_size": 60}, "60"),
        ({"head_size": 264}, "264"),
        ({"value_size": 128}, "64"),
        ({"capability": (7, 5)}, "bfloat16"),
        ({"hip": "6.4"}, "bfloat16"),
    ],
)
def test_gpu_without_flash_attention_of_torch_is_warned_about_once(monkeypatch, caplog, changed, named_in_warning):
    case = {"dtype": torch.bfloat16, "head_size": 64, "value_size": 64, "capability": (8, 0), "hip": None} | changed
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: case["capability"])
    monkeypatch.setattr("torch.version.hip", case["hip"])
    pack.flash_supports.cache_clear()
    for _ in range(2):
        supported = pack.flash_supports("cuda", case["dtype"], case["head_size"], case["value_size"])
        assert supported == (named_in_warning is None)
    pack.flash_supports.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    if named_in_warning is None:
        assert messages == []
    else:
        [message] = messages
        assert named_in_warning in message


def test_cpu_has_no_flash_attention():
    assert not pack.flash_supports("cpu", torch.bfloat16, 64, 64)


def test_queries_in_fp32_are_cast_under_autocast():
    """In transformers, a norm of the queries may return fp32, which torch's flash attention does not accept."""
    plan = packed_rows(2).packed.plan
    query, key, value = vectors_of_ones(plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = pack.attend(None, query, key.bfloat16(), value.bfloat16(), None, plan=plan)
    assert output.dtype == torch.bfloat16


def test_attention_uses_the_dropout_of_the_model():
    plan = packed_rows(2).packed.plan
    vectors = vectors_of_ones(plan)
    without_dropout, _ = pack.attend(None, *vectors, None, plan=plan, dropout=0.0)
    with_dropout, _ = pack.attend(None, *vectors, None, plan=plan, dropout=0.5)
    torch.testing.assert_close(without_dropout, vectors[0].transpose(1, 2))  # all values are 1
    assert (with_dropout - without_dropout).abs().max() > 0.1


@pytest.mark.parametrize("unsupported", [{"plan": None}, {"sliding_window": 64}, {"s_aux": torch.ones(4)}])
def test_model_with_unsupported_attention_is_rejected(unsupported):
    plan = packed_rows(2).packed.plan
    with pytest.raises(IntegrationError, match="share_prompts=False"):
        pack.attend(None, *vectors_of_ones(plan), None, **({"plan": plan} | unsupported))


@pytest.mark.parametrize(("change", "is_rejected"), [(0.0, False), (0.03, False), (0.3, True)])
def test_change_of_log_probs_beyond_rounding_of_bf16_is_rejected(change, is_rejected):
    log_probs = -torch.rand(200, generator=torch.Generator().manual_seed(0))
    rounding = torch.finfo(torch.bfloat16).eps
    excess = engine.excess_over_rounding(log_probs + change, log_probs, log_probs, rounding)
    assert (float(excess) > engine.FACTOR) == is_rejected


@pytest.mark.parametrize("kind", ["every token", "one percent of the tokens"])
def test_packing_may_change_log_probs_as_much_as_micro_batches_do(kind):
    """The changes of verl's own micro-batches are the unit, if they are larger than rounding."""
    in_one = -torch.ones(200)
    change_of_micro_batches = torch.zeros(200)
    change_of_micro_batches[: 200 if kind == "every token" else 2] = 0.5
    in_two = in_one + change_of_micro_batches
    packed = in_one + 3 * change_of_micro_batches
    excess = engine.excess_over_rounding(packed, in_two, in_one, torch.finfo(torch.float32).eps)
    assert float(excess) == pytest.approx(3.0)


def test_log_prob_that_is_not_a_number_exceeds_every_limit():
    log_probs = -torch.ones(200)
    packed = log_probs.clone()
    packed[7] = torch.nan
    excess = engine.excess_over_rounding(packed, log_probs, log_probs, torch.finfo(torch.bfloat16).eps)
    assert not excess <= engine.FACTOR


def test_model_with_positions_of_several_dimensions_is_rejected():
    rows = packed_rows(2)
    positions = rows.data["position_ids"]
    three_dimensions = positions.values()[:, None].expand(-1, 3).contiguous()
    rows.data["position_ids"] = torch.nested.nested_tensor_from_jagged(three_dimensions, positions.offsets())
    tu.assign_non_tensor(rows.data, **{SHARE_MARK: True})
    with pytest.raises(IntegrationError, match="share_prompts=False"):
        pack.wrap_inputs(lambda *_: ({}, {}), None, rows.data)
