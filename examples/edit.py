"""When most of the answer is known already, hand it over as a prediction. The bytes stay the same."""

from paceline import LLM, SamplingParams

CODE = """def total(values):
    result = 0
    for value in values:
        result = result + value
    return result
"""

llm = LLM("smollm2")
ask = [{"role": "user", "content": f"Rename `result` to `sum_so_far`. Print only the code.\n\n{CODE}"}]
params = SamplingParams(temperature=0, max_tokens=80)

plain = llm.generate(ask, params, speculate="off")
fast = llm.generate(ask, params, prediction=CODE)

print(fast.text)
print(f"identical: {plain.tokens == fast.tokens}")
print(f"passes: {plain.speculation.passes} plain, {fast.speculation.passes} with the prediction")
