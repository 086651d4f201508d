// What both programs ask of the server, and how they tell what came: a JSON line for each feature.
import { createInterface } from "node:readline";

export const KEY = process.env.TANDEM_CLIENTS_KEY;
export const BASE = `${process.env.TANDEM_CLIENTS_URL}/v1`;
export const MODEL = "smol";
export const QUESTION = "Which city is the capital of France?";
export const WEATHER = "How is the weather in Paris?";
export const LONG = 1500;
export const MANY = 12;

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

export function tell(feature, facts) {
  console.log(JSON.stringify({ feature, ...facts }));
}

// Waits until the test has looked at the workers.
export async function looked() {
  await lines.next();
}

export function words(number) {
  return Array(number).fill("word").join(" ");
}
