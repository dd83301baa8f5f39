"""A server of a language model: requests come and go over HTTP, their tokens stream, and a load test asks it.

    python -m examples.serving serve --port 8000
    curl -N 127.0.0.1:8000/generate -d '{"input_ids": [3, 1, 4], "max_new_tokens": 8}'
    python -m examples.serving load --requests 200

`model` makes the model, whose weights are random, and its cache, in pages or as PyTorch's attention would have it;
`server` runs a `fastattn.nn.ContinuousBatch` behind HTTP, and `load` checks and times what it answers.
"""
