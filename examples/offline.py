"""Answers to a batch of prompts in this process, without a server.

.venv/bin/python examples/offline.py            # the model that comes along
.venv/bin/python examples/offline.py Qwen/Qwen3-0.6B
"""

import sys

from tandem import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def main() -> None:
    """Print each prompt with its answer."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
