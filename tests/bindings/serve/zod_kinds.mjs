// Schemas of zod through Vercel's `ai` against a running server, by hand. Node looks for packages
// beside the script, so copy it to an empty folder and there:
//   npm install ai @ai-sdk/openai-compatible zod
//   tamis serve -m qwen2.5-coder-0.5b --port 8080 &
//   node zod_kinds.mjs http://127.0.0.1:8080/v1
// Each kind is asked for as an object and as the arguments of a tool; the status is 1 if one is
// refused, is cut at the limit of tokens or is not what its schema says. Small models nest on and
// on unless they are told how deep.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, tool } from "ai";
import { z } from "zod";

const Node = z.object({
  value: z.int(),
  get below() {
    return z.array(Node).max(1);
  },
});
const kinds = {
  string: z.string().max(12),
  "string limits": z.string().min(2).max(4),
  pattern: z.string().regex(/^[a-z]{2,5}$/),
  integer: z.int(),
  "number limits": z.number().min(3).max(9),
  multiple: z.int().multipleOf(5).min(0).max(50),
  boolean: z.boolean(),
  null: z.null(),
  enum: z.enum(["red", "blue"]),
  literal: z.literal(["a", 1, true]),
  optional: z.int().optional(),
  nullable: z.int().nullable(),
  union: z.union([z.int(), z.boolean()]),
  "discriminated union": z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("cat"), lives: z.int() }),
    z.object({ kind: z.literal("dog"), barks: z.boolean() }),
  ]),
  intersection: z.intersection(z.object({ a: z.int() }), z.object({ b: z.boolean() })),
  array: z.array(z.int()).min(1).max(3),
  "array of one": z.array(z.int()).max(1),
  tuple: z.tuple([z.int(), z.boolean()]),
  record: z.record(z.enum(["x", "y"]), z.int()),
  nested: z.object({ inner: z.object({ flag: z.boolean() }).strict() }),
  recursive: Node,
  datetime: z.iso.datetime(),
  date: z.iso.date(),
  uuid: z.uuid(),
  email: z.email().max(24),
  ipv4: z.ipv4(),
  default: z.int().default(3),
};
const hints = { recursive: "a value, below it one value, and below that nothing" };

const provider = createOpenAICompatible({
  name: "local",
  baseURL: process.argv[2] ?? "http://127.0.0.1:8080/v1",
  supportsStructuredOutputs: true,
});
const how = { model: provider("local"), temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
let nWrong = 0;
for (const [kind, field] of Object.entries(kinds)) {
  const schema = z.object({ field });
  const prompt = `Give a short example of: ${hints[kind] ?? kind}. Answer with JSON, in one line.`;
  const told = [];
  for (const way of ["object", "tool"]) {
    try {
      if (way === "object") {
        const found = await generateText({ ...how, prompt, output: Output.object({ schema }) });
        told.push(JSON.stringify(schema.parse(found.output)));
      } else {
        const tools = { put: tool({ description: "Takes a record", inputSchema: schema }) };
        const found = await generateText({ ...how, prompt, tools, toolChoice: "required" });
        told.push(JSON.stringify(schema.parse(found.toolCalls[0].input)));
      }
    } catch (error) {
      nWrong += 1;
      told.push(`WRONG ${String(error.message).slice(0, 120)} ${String(error.responseBody ?? error.text ?? "").slice(0, 200)}`);
    }
  }
  console.log(`${kind}: ${told.join(" | ")}`);
}
const n = 2 * Object.keys(kinds).length;
console.log(`${n - nWrong} of ${n} right`);
process.exit(nWrong ? 1 : 0);
