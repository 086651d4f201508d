// The openai package for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, KEY, LONG, MANY, MODEL, QUESTION, WEATHER, looked, tell, words } from "./served.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const chat = [{ role: "user", content: QUESTION }];
const greedy = { model: MODEL, messages: chat, temperature: 0, max_tokens: 12 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Lyon"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const whole = await client.chat.completions.create(greedy);
tell("chat", { text: whole.choices[0].message.content });

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
tell("stream", { text });
tell("usage", { whole: whole.usage.prompt_tokens, streamed: usage.prompt_tokens });

const messages = [{ role: "user", content: WEATHER }];
const calls = [];
for (const tool_choice of [{ type: "function", function: { name: "weather" } }, "required"]) {
  const said = await client.chat.completions.create({
    ...greedy,
    messages,
    tools: [weather],
    tool_choice,
    parallel_tool_calls: false,
    max_tokens: 200,
  });
  const [call] = said.choices[0].message.tool_calls;
  calls.push(JSON.parse(call.function.arguments));
  messages.push(said.choices[0].message);
  messages.push({ role: "tool", tool_call_id: call.id, content: "Sunny." });
}
const last = await client.chat.completions.create({
  ...greedy,
  messages,
  tools: [weather],
  tool_choice: "none",
});
tell("tools", { calls, text: last.choices[0].message.content });

const City = z.object({ name: z.enum(["Paris", "Lyon"]), is_capital: z.boolean() });
const parsed = await client.chat.completions.parse({
  ...greedy,
  max_tokens: 200,
  response_format: zodResponseFormat(City, "city"),
});
tell("structured output", { object: parsed.choices[0].message.parsed });

const scored = await client.chat.completions.create({ ...greedy, logprobs: true, top_logprobs: 2 });
const content = scored.choices[0].logprobs.content;
tell("logprobs", {
  logprobs: content.map((each) => each.logprob),
  best: content.map((each) => each.top_logprobs[0].logprob),
});

const vectors = await client.embeddings.create({ model: MODEL, input: ["Paris", "a cat"] });
tell("embeddings", { lengths: vectors.data.map((each) => each.embedding.length) });

const asked = { model: MODEL, max_output_tokens: 12, temperature: 0 };
const first = await client.responses.create({ ...asked, input: QUESTION });
const events = client.responses.stream({
  ...asked,
  input: "Sure?",
  previous_response_id: first.id,
});
const second = await events.finalResponse();
tell("responses", { text: first.output_text, second: second.output_text });

const errors = [];
for (const [client_, more] of [
  [client, { temperature: -1 }],
  [client.withOptions({ apiKey: "wrong" }), {}],
  [client, { model: "nobody" }],
]) {
  try {
    await client_.chat.completions.create({ ...greedy, ...more });
  } catch (error) {
    const kind = error instanceof OpenAI.APIError ? error.constructor.name : "";
    errors.push({ status: error.status, message: error.message, kind });
  }
}
tell("errors", { errors });

const counts = await Promise.all(
  Array.from({ length: MANY }, async (_, index) => {
    const one = [{ role: "user", content: words(index + 1) }];
    return (await client.chat.completions.create({ ...greedy, messages: one })).usage.prompt_tokens;
  }),
);
tell("batch", { counts });

const long = await client.chat.completions.create({
  ...greedy,
  max_tokens: LONG,
  ignore_eos: true,
  stream: true,
});
const chunks = long[Symbol.asyncIterator]();
await chunks.next();
tell("cancel", { state: "running" });
await looked();
long.controller.abort();
tell("cancel", { state: "closed" });
await looked();
process.exit(0);
