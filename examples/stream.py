"""Show text as it comes; capital letters are words that a drafter guessed and the model confirmed."""

from paceline import LLM, SamplingParams

llm = LLM("smollm2", speculate="suffix")
prompt = "one two three four five one two three four five one two three"

for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=48)):
    print(chunk.text.upper() if any(chunk.sources) else chunk.text, end="", flush=True)
print()
