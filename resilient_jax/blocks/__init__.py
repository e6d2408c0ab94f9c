"""A model as a chain of blocks: the embedding, each layer, the head with the loss, with the programs of each.

`cut_model.cut_model` returns a `CutModel`; `layer_marks.mark_layers` tells it where the layers of an NNX model are.
"""
