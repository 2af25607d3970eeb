"""Late interaction (Khattab and Zaharia, 2020, arXiv:2004.12832: ColBERT): a vector for each token, and scores by the best of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.runtime.errors import UsageError
from gristmill.runtime.pooling.front import PoolingFront
from gristmill.runtime.pooling.late_texts import LateTexts
from gristmill.runtime.pooling.pairs import Activation, PairInputs
from gristmill.runtime.pooling.scoring import no_instruction


class LateScorer:
    """The sum over the tokens of the query of the largest product with a token of the document, of vectors of length 1."""

    def __init__(self, texts: LateTexts) -> None:
        self.texts = texts

    def inputs(
        self, front: PoolingFront, pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: bool
    ) -> PairInputs:
        """As of `Scorer`."""
        no_instruction(front, instruction)
        return PairInputs.apart(
            pairs, lambda texts, asks: self.texts.inputs(front.encode, texts, asks, truncate)
        )

    def scores(self, made: PairInputs, results: Sequence[Tensor], activation: Activation | None) -> Tensor:
        """As of `Scorer`."""
        if activation is not None:
            raise UsageError(
                "activation is of a classifier's logit, and this model compares the vectors of tokens"
            )
        documents = {
            pair[1]: self.texts.vectors(made.inputs[pair[1]], results[pair[1]], False) for pair in made.pairs
        }
        return torch.stack(
            [best_products(results[query], documents[document]) for query, document in made.pairs]
        )


def best_products(query: Tensor, document: Tensor) -> Tensor:
    """query [m, D], document [n, D] -> the sum over m of the largest product with a row of the document, of rows made of length 1; 0 without rows."""
    query, document = (torch.nn.functional.normalize(part, dim=-1) for part in (query, document))
    if not len(document):
        return query.new_zeros(())
    return (query @ document.T).amax(1).sum()
