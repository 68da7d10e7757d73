"""Show text as it comes; capital letters are words that a drafter guessed and the model confirmed."""

from paceline import LLM, SamplingParams

# A fixed length drafts whenever it can; without it the planner drafts when that pays on this machine.
llm = LLM("smollm2", speculate="suffix:num_speculative_tokens=4")
prompt = "one two three four five one two three four five one two three"

for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=48)):
    print(chunk.text.upper() if any(chunk.sources) else chunk.text, end="", flush=True)
print()
