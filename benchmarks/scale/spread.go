// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
)

// writeSpread tells how much more than the average the busiest master of a
// Cluster has to do, for users who are equal and for users as Zipf has them.
func writeSpread(out io.Writer) {
	fmt.Fprintf(out, "\n%-28s  %8s  %14s  %14s\n", "busiest master of a Cluster", "masters", "equal users", "Zipf 1.1")
	for _, masters := range []int{1, 3, 6, 10, 30} {
		fmt.Fprintf(out, "%-28s  %8d  %13.2fx  %13.2fx\n", "", masters,
			busiest(masters, func(int) float64 { return 1 }),
			busiest(masters, func(rank int) float64 { return math.Pow(float64(rank), -1.1) }))
	}
	total := 0.0
	for rank := 1; rank <= users; rank++ {
		total += math.Pow(float64(rank), -1.1)
	}
	fmt.Fprintf(out, "the first of %d users as Zipf has them sends %.0f %% of the requests\n", users, 100/total)
}

// busy is how much of a core a Redis should use at most: above, waits grow.
const busy = 0.7

// writeEstimates tells what Redis carries, by the cost of a decision in us.
func writeEstimates(out io.Writer, costs map[string]float64) {
	fmt.Fprintf(out, "\n%-28s  %8s  %14s  %18s\n", "estimate: decisions/s at 70 %", "masters", "rate", "rate + concurrency")
	for _, masters := range []int{1, 3, 6, 10} {
		even := float64(masters) / busiest(masters, func(int) float64 { return 1 })
		fmt.Fprintf(out, "%-28s  %8d  %14.0f  %18.0f\n", "", masters,
			even*busy*1e6/costs["rate"], even*busy*1e6/costs["rate + concurrency"])
	}
}

// busiest returns the load of the busiest master over the average, the mean of
// a hundred ways to spread the users. All keys of a user are on one master.
func busiest(masters int, weight func(rank int) float64) float64 {
	const ways = 100
	r := rand.New(rand.NewPCG(1, 2))
	sum := 0.0
	for range ways {
		loads := make([]float64, masters)
		total := 0.0
		for rank := 1; rank <= users; rank++ {
			w := weight(rank)
			loads[r.IntN(masters)] += w
			total += w
		}
		top := 0.0
		for _, l := range loads {
			top = max(top, l)
		}
		sum += top / total * float64(masters)
	}
	return sum / ways
}
