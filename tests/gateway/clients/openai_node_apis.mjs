// The openai SDK for Node beyond a chat of text. Usage: URL CHAT-MODEL EMBEDDING-MODEL SPEECH-MODEL; prints JSON.
import OpenAI, { toFile } from "openai";

const [url, chat, vectors, speech] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const raised = (promise) => promise.then(() => ["answered"], (error) => [error.status, error.code]);
const picture = { type: "image_url", image_url: { url: "https://pictures.example/cat.png" } };
const tool = { type: "function", function: { name: "weather", parameters: { type: "object", properties: {} } } };
const ask = {
  model: chat, max_tokens: 5, tools: [tool], messages: [{ role: "user", content: [{ type: "text", text: "What?" }, picture] }],
};
const whole = await client.chat.completions.create(ask);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }))
  text += chunk.choices[0]?.delta?.content ?? "";
const response = await client.responses.create({ model: chat, input: "Hello", max_output_tokens: 16 });
let deltas = "";
for await (const event of await client.responses.create({ model: chat, input: "Hello", max_output_tokens: 16, stream: true }))
  if (event.type === "response.output_text.delta") deltas += event.delta;
const embeddings = (await client.embeddings.create({ model: vectors, input: ["a", "b"] })).data;
const sound = async () => ({ model: speech, file: await toFile(Buffer.alloc(60000), "a.wav") });
let streamed = "";
for await (const event of await client.audio.transcriptions.create({ ...(await sound()), stream: true }))
  streamed += event.choices[0].delta.content;
console.log(JSON.stringify({
  same: text === whole.choices[0].message.content,
  choices: (await client.chat.completions.create({ ...ask, n: 2 })).choices.length,
  response: response.usage.output_tokens,
  deltas: deltas === response.output_text,
  vectors: [embeddings.length, embeddings[0].embedding.length],
  sound: (await client.audio.transcriptions.create(await sound())).text,
  translated: (await client.audio.translations.create(await sound())).text,
  streamed,
  models: (await client.models.list()).data.map((one) => one.id).sort(),
  model: (await client.models.retrieve(`team/${chat}`)).id,
  unknown: await raised(client.chat.completions.create({ ...ask, model: "nobody" })),
  stored: await raised(client.responses.retrieve("resp_1")),
}));
