"""German-to-English translation: a Transformer that learns from two parallel text files.

    python -m examples.translation train --data DATA/multi30k
    python -m examples.translation evaluate --data DATA/multi30k
    echo "Ein Hund läuft über die Wiese." | python -m examples.translation translate
    torchrun --nproc-per-node 2 -m examples.translation.parallel --data DATA/multi30k --context 2

The model is `fastattn.nn.Seq2SeqModel`. `text` converts sentences to ids, `batches` ids to tensors, `train` trains the
model, `parallel` does so on several processes, `translator` translates with it, and `speed` times it beside torch.nn's
layers.
"""
