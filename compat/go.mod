module github.com/stripe-ratelimit/caddy-stripe-ratelimit/compat

go 1.26.0

require (
	github.com/dunglas/httpsfv v1.1.2
	github.com/hashicorp/go-retryablehttp v0.7.8
	github.com/stripe/stripe-go/v81 v81.4.0
	github.com/stripe/stripe-go/v86 v86.4.0
)

require github.com/hashicorp/go-cleanhttp v0.5.2 // indirect
