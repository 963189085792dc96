// Vercel's AI SDK: a chat whole, and in pieces.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "jaxkv", baseURL: url, apiKey: "none" });
const asked = {
  model: provider(name),
  prompt: "Name a colour of the sky.",
  temperature: 0,
  maxOutputTokens: 24,
  maxRetries: 0,
};
const { text, usage } = await generateText(asked);
console.log(JSON.stringify(text), usage);
let pieces = "";
for await (const each of streamText(asked).textStream) pieces += each;
if (pieces !== text) throw new Error(`in pieces: ${JSON.stringify(pieces)}`);
