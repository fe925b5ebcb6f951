"""BERT: models, and the metrics of pre-training and of SQuAD. The data of its examples is in `examples/bert`.

`bert`, `bert_medium` and `bert_tiny` are implemented here; `pretraining` and `question_answering` make models
of the transformers library, which compute their own loss.
"""

from plait.workloads.bert.heads import masked_accuracy, pretraining, question_answering, span_accuracy
from plait.workloads.bert.model import bert, bert_medium, bert_tiny

__all__ = [
    "bert",
    "bert_medium",
    "bert_tiny",
    "masked_accuracy",
    "pretraining",
    "question_answering",
    "span_accuracy",
]
