"""German-to-English translation: a Transformer that learns from two parallel text files.

    python -m examples.translation train --data DATA/multi30k
    python -m examples.translation evaluate --data DATA/multi30k
    echo "Ein Hund läuft über die Wiese." | python -m examples.translation translate

The model is `fastattn.nn.Seq2SeqModel`. `text` converts sentences to ids, `batches` ids to tensors, `train` trains the
model, `translator` translates with it, and `speed` times it beside torch.nn's layers.
"""
