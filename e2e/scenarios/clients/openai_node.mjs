// The openai SDK for Node: a stream, a whole answer, the model list, a refusal. Usage: URL MODEL
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const ask = { model, messages, max_tokens: 12, temperature: 0, ignore_eos: true };
const whole = await client.chat.completions.create(ask);
let text = "", tokens = 0;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  tokens = chunk.usage?.completion_tokens ?? tokens;
}
const models = (await client.models.list()).data.map((m) => m.id);
const refusal = await client.chat.completions.create({ ...ask, model: "nobody" }).then(() => "none", (error) => error.code);
console.log(JSON.stringify({
  same: text === whole.choices[0].message.content,
  tokens: [whole.usage.completion_tokens, tokens],
  finish: whole.choices[0].finish_reason,
  models,
  refusal,
}));
