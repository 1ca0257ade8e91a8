"""What a plain Hugging Face model says of one row at a time, without padding."""

from functools import cache

import torch
from builders import tiny

SHORT = {"epochs": 1, "n_train": 6, "n_validation": 3, "n": 4, "batch_size": 4}


@cache
def model_of(family="llama"):
    """A model in float32, as users have it, that is only read."""
    return tiny(family, torch.float32)


def one_row(network, ids, embedding=None):
    """Log-probabilities of one row without padding, behind an embedding if there is one."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        if embedding is None:
            return network(input_ids=tokens).logits[0].log_softmax(-1)
        embedded = network.get_input_embeddings()(tokens)
        whole = torch.cat([embedding[None], embedded], dim=1)
        return network(inputs_embeds=whole).logits[0, len(embedding) :].log_softmax(-1)


def mean_log_probabilities(network, prompts, embedding=None):
    found = []
    for row in range(len(prompts)):
        ids = prompts.tokens[row][prompts.mask[row]].tolist()
        answer = prompts.answers[row]
        given = one_row(network, [*ids, *answer[:-1]], embedding)[len(ids) - 1 :]
        found.append(given.gather(1, torch.tensor(answer)[:, None]).mean().item())
    return found
