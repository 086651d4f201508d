// The AI SDK with its provider for servers of OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, KEY, LONG, MANY, MODEL, QUESTION, WEATHER, looked, tell, words } from "./served.mjs";

const place = { name: "tandem", baseURL: BASE, includeUsage: true, supportsStructuredOutputs: true };
const provider = createOpenAICompatible({ ...place, apiKey: KEY });
const wrong = createOpenAICompatible({ ...place, apiKey: "wrong" });
const once = { model: provider(MODEL), temperature: 0, maxRetries: 0 };
const greedy = { ...once, prompt: QUESTION, maxOutputTokens: 12 };

const whole = await generateText(greedy);
tell("chat", { text: whole.text });

const stream = streamText(greedy);
let text = "";
for await (const delta of stream.textStream) text += delta;
tell("stream", { text });
tell("usage", { whole: whole.usage.inputTokens, streamed: (await stream.usage).inputTokens });

const calls = [];
const weather = tool({
  description: "A city's weather.",
  inputSchema: z.object({ city: z.enum(["Paris", "Lyon"]) }),
  execute: async (input) => {
    calls.push(input);
    return "Sunny.";
  },
});
const loop = await generateText({
  ...once,
  prompt: WEATHER,
  maxOutputTokens: 200,
  tools: { weather },
  stopWhen: stepCountIs(5),
  prepareStep: ({ stepNumber }) => ({
    toolChoice: stepNumber < 2 ? { type: "tool", toolName: "weather" } : "none",
  }),
});
tell("tools", { calls, text: loop.text });

const City = z.object({ name: z.enum(["Paris", "Lyon"]), is_capital: z.boolean() });
const structured = await generateText({
  ...greedy,
  maxOutputTokens: 200,
  output: Output.object({ schema: City }),
});
tell("structured output", { object: structured.output });

const vectors = await embedMany({
  model: provider.embeddingModel(MODEL),
  values: ["Paris", "a cat"],
});
tell("embeddings", { lengths: vectors.embeddings.map((each) => each.length) });

const errors = [];
for (const more of [{ temperature: -1 }, { model: wrong(MODEL) }, { model: provider("nobody") }]) {
  try {
    await generateText({ ...greedy, ...more });
  } catch (error) {
    const kind = APICallError.isInstance(error) ? "APICallError" : "";
    errors.push({ status: error.statusCode, message: error.message, kind });
  }
}
tell("errors", { errors });

const counts = await Promise.all(
  Array.from({ length: MANY }, async (_, index) => {
    const answer = await generateText({ ...greedy, prompt: words(index + 1) });
    return answer.usage.inputTokens;
  }),
);
tell("batch", { counts });

const abort = new AbortController();
const long = streamText({
  ...greedy,
  maxOutputTokens: LONG,
  providerOptions: { tandem: { ignore_eos: true } },
  abortSignal: abort.signal,
});
const deltas = long.textStream[Symbol.asyncIterator]();
await deltas.next();
tell("cancel", { state: "running" });
await looked();
abort.abort();
tell("cancel", { state: "closed" });
await looked();
process.exit(0);
