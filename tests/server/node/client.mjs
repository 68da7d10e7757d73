// Asks a server what a JavaScript program would, and prints what came back as one JSON object.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const ask = { model: "stub", messages: [{ role: "user", content: "abcabc" }], max_tokens: 24, temperature: 0 };
const found = {};

const whole = await client.chat.completions.create(ask);
found.whole = whole.choices[0].message.content;
found.usage = whole.usage;

found.pieces = [];
for await (const event of await client.chat.completions.create({
  ...ask, stream: true, stream_options: { include_usage: true },
})) {
  if (event.choices.length) found.pieces.push(event.choices[0].delta.content ?? "");
  else found.streamed_usage = event.usage;
}

const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
const shaped = await client.chat.completions.create({
  ...ask, response_format: { type: "json_schema", json_schema: { name: "answer", schema } },
});
found.shaped = shaped.choices[0].message.content;

found.errors = {};
const wrong = {
  model: () => client.chat.completions.create({ ...ask, model: "nobody" }),
  field: () => client.chat.completions.create({ ...ask, foo: 1 }),
  key: () => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(),
};
for (const [name, call] of Object.entries(wrong)) {
  try {
    await call();
  } catch (error) {
    found.errors[name] = [error.constructor.name, error.status];
  }
}

const leaving = new AbortController();
const long = { ...ask, max_tokens: 100000, ignore_eos: true, stream: true };
let events = 0;
try {
  for await (const _ of await client.chat.completions.create(long, { signal: leaving.signal })) {
    if (++events === 5) leaving.abort();
  }
} catch { /* some versions end the loop, some throw */ }
found.events = events;
console.log(JSON.stringify(found));
