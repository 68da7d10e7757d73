"""One question, one answer, and what speculation did for it."""

from paceline import LLM, SamplingParams

llm = LLM("smollm2")
question = [{"role": "user", "content": "List the days of the week, each on a line of its own."}]
answer = llm.generate(question, SamplingParams(temperature=0, max_tokens=64))

print(answer.text)
print(f"{answer.finish_reason}: {len(answer.tokens)} tokens")
print(f"{answer.speculation.mean_acceptance_length:.2f} tokens per pass of the model")
