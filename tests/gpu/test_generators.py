"""A generator on a real GPU, moved to where the draws of old outputs have left it, goes on as if it had made them."""

import pytest

from midstream.adapters.vllm.generators import OFFSET_OF_ROW, VOCABULARY_MAX, _offset_of_row

pytestmark = pytest.mark.gpu

DRAWS = 137


@pytest.mark.parametrize("vocabulary", [1, 255, 32_000, 49_152, 128_256, 151_936, VOCABULARY_MAX])
def test_draws_of_a_vocabulary_move_it_by_the_same_offset_each(vocabulary: int) -> None:
    import torch

    device = torch.device("cuda", 0)
    assert _offset_of_row(device) == OFFSET_OF_ROW
    # A row of a batch, as the sampler draws it, beside rows that others draw.
    noise = torch.empty((3, vocabulary), device=device)
    drawn = torch.Generator(device=device)
    drawn.manual_seed(7)
    for _ in range(DRAWS):
        noise[1].exponential_(generator=drawn)
    moved = torch.Generator(device=device)
    moved.manual_seed(7)
    moved.set_offset(OFFSET_OF_ROW * DRAWS)
    assert moved.get_offset() == drawn.get_offset()
    other = torch.empty((5, vocabulary), device=device)
    for _ in range(3):
        noise[1].exponential_(generator=drawn)
        other[4].exponential_(generator=moved)
        assert torch.equal(noise[1], other[4])
    # What vLLM takes back of a token that is thrown away is one draw.
    again = noise[1].clone()
    drawn.set_offset(drawn.get_offset() - OFFSET_OF_ROW)
    noise[1].exponential_(generator=drawn)
    assert torch.equal(noise[1], again)
