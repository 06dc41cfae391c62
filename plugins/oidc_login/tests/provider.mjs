// A real OpenID provider, `oidc-provider` from npm, whose pages let everybody sign in under any name.
// It prints its URL, and then, for each line of JSON on its standard input, "done" once it goes by it.
import { generateKeyPairSync, randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

console.info = console.warn = console.error; // the standard output is for us alone
const { Provider } = await import(pathToFileURL(process.argv[2]).href);
const clock = Date.now;
let shift = 0; // of the provider's clock, in ms
Date.now = () => clock() + shift;

function newKey() {
  const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
  return { ...privateKey.export({ format: "jwk" }), kid: randomUUID(), use: "sig", alg: "RS256" };
}

const server = createServer((request, answer) => current(request, answer));
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const issuer = `http://127.0.0.1:${server.address().port}`;
let keys = [newKey()];
let clients = [];
let current;

function restart() {
  const provider = new Provider(issuer, {
    clients,
    jwks: { keys },
    cookies: { keys: ["signs the provider's own cookies"] },
    claims: { openid: ["sub"], profile: ["groups"], email: ["email", "email_verified"] },
    pkce: { required: () => true },
    findAccount: (_, id) => ({
      accountId: id,
      claims: () => ({
        sub: id,
        email: `${id}@example.org`,
        email_verified: id !== "mallory",
        groups: id === "root" ? ["people", "admins"] : ["people"],
      }),
    }),
    features: {
      clientCredentials: { enabled: true },
      rpInitiatedLogout: { enabled: true },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: (_, audience) => ({ scope: "", audience, accessTokenFormat: "jwt" }),
      },
    },
  });
  current = provider.callback();
}

restart();
console.log(issuer);
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  if (asked.clients) clients = asked.clients;
  if (asked.rotate) keys = [newKey()];
  shift = 1000 * (asked.shift_s ?? 0);
  restart();
  console.log("done");
}
process.exit();
