// Vercel's AI SDK: a chat whole and in pieces, an object of a schema, and a call of a tool.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "jaxkv",
  baseURL: url,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
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

const schema = z.object({ sky: z.enum(["blue", "grey"]), warm: z.boolean() });
const long = { ...asked, maxOutputTokens: 300 };
const { object } = await generateObject({ ...long, schema });
console.log(schema.parse(object));

const look = tool({
  description: "Looks up or down.",
  inputSchema: z.object({ where: z.enum(["up", "down"]) }),
});
const { toolCalls } = await generateText({ ...long, tools: { look }, toolChoice: "required" });
console.log(toolCalls);
if (toolCalls.length !== 1 || toolCalls[0].toolName !== "look") throw new Error("no call");
