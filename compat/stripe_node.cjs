// SPDX-License-Identifier: Apache-2.0
//
// Makes customers with stripe-node until a request is answered 429 or 503, or
// `calls` calls are made, and prints what each call came to as a JSON array.
//
//   node stripe_node.cjs '{"url": "http://127.0.0.1:80", "key": "sk_live_1", "calls": 3}'

const Stripe = require('stripe');

const { url, key, calls } = JSON.parse(process.argv[2]);
const { hostname, port } = new URL(url);

const httpClient = Stripe.createNodeHttpClient();
const makeRequest = httpClient.makeRequest.bind(httpClient);
let statuses;
httpClient.makeRequest = async (...args) => {
  const response = await makeRequest(...args);
  statuses.push(response.getStatusCode());
  return response;
};

const stripe = new Stripe(key, { host: hostname, port, protocol: 'http', httpClient, telemetry: false });

async function main() {
  const results = [];
  do {
    statuses = [];
    const result = { statuses };
    try {
      result.id = (await stripe.customers.create({})).id;
      result.ok = true;
    } catch (err) {
      result.error = {
        rate_limit_error: err instanceof Stripe.errors.StripeRateLimitError,
        name: err.constructor.name,
        status: err.statusCode,
        code: err.code,
        type: err.rawType,
        message: err.message,
        request_id: err.requestId,
        doc_url: err.doc_url,
        headers: err.headers,
      };
    }
    results.push(result);
  } while (results.length < calls && !statuses.some((status) => status === 429 || status === 503));
  // stripe-node leaves the bodies of what it retries unread, and so their
  // connections open, which keeps node alive for another 80 seconds.
  process.stdout.write(JSON.stringify(results), () => process.exit());
}

main();
