// The openai SDK for Node with its default retries, as it is told to ask on stdin, see openai_python.py. Usage: URL
import OpenAI from "openai";
import readline from "node:readline";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });

async function ask(model, words, stream) {
  try {
    const found = await client.chat.completions.create({ model, messages: [{ role: "user", content: words }], stream });
    if (stream) for await (const _ of found);
    return "succeeded";
  } catch (error) {
    return error.status ? `${error.status} ${error.code}` : error.constructor.name;
  }
}

console.log("ready");
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { model, words, stream } = JSON.parse(line);
  console.log(JSON.stringify(await Promise.all(words.map((one) => ask(model, one, stream)))));
}
