// The openai package of npm: a chat whole, and in pieces.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour of the sky." }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };
const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
console.log(JSON.stringify(text), whole.usage);
let pieces = "";
for await (const each of await client.chat.completions.create({ ...asked, stream: true })) {
  pieces += each.choices[0]?.delta?.content ?? "";
}
if (pieces !== text) throw new Error(`in pieces: ${JSON.stringify(pieces)}`);
