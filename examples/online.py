"""A chat over HTTP with the openai package, token by token; needs a server, say `make up`.

.venv/bin/python examples/online.py http://127.0.0.1:8000 "What is the capital of France?"
"""

import sys

import openai


def main() -> None:
    """Print the answer as it comes."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any, as the server has none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
