// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

var (
	caddyColor = color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff} // told apart by the color-blind, too
	redisColor = color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}
)

// draw returns an SVG: CPU for each request, `respond` above reverse_proxy.
func (r *report) draw() ([]byte, error) {
	plot.DefaultFont.Variant = "Sans"
	canvas := vgsvg.New(19*vg.Centimeter, 16*vg.Centimeter)
	page := draw.New(canvas)
	page.FillPolygon(color.White, []vg.Point{page.Min, {X: page.Max.X, Y: page.Min.Y}, page.Max, {X: page.Min.X, Y: page.Max.Y}})
	var panels [][]*plot.Plot
	for _, answer := range []string{"respond", "proxy"} {
		p, err := r.panel(answer)
		if err != nil {
			return nil, err
		}
		panels = append(panels, []*plot.Plot{p})
	}
	panels[0][0].Title.Text = "CPU for each request, HTTP/1.1: respond"
	panels[1][0].Title.Text = "behind reverse_proxy"
	panels[1][0].X.Label.Text = "µs"
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadLeft: 2 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadRight: 4 * vg.Millimeter, PadY: 5 * vg.Millimeter}
	for i, row := range plot.Align(panels, tiles, page) {
		panels[i][0].Draw(row[0])
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	// The letters of Arial are as wide, and it is where Liberation is not.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif")), nil
}

// panel has a bar for each way to limit, the first at the top.
func (r *report) panel(answer string) (*plot.Plot, error) {
	var caddy, redis plotter.Values
	var names []string
	for _, setup := range slices.Backward(setups) {
		s := r.find(scenario{setup.name, answer, "h1", "uniform", 0})
		if s == nil {
			continue
		}
		names = append(names, s.name())
		caddy = append(caddy, s.over(func(p point) float64 { return p.Caddy }).median)
		redis = append(redis, s.over(func(p point) float64 { return p.Redis }).median)
	}
	p := plot.New()
	p.Title.TextStyle.Font.Size, p.Title.Padding = 13, 2*vg.Millimeter
	p.X.Min = 0
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Width = color.Gray{Y: 0xdd}, 0
	p.Add(grid)
	if len(names) == 0 {
		return p, nil
	}
	p.NominalY(names...)
	ofCaddy, err := plotter.NewBarChart(caddy, 4*vg.Millimeter)
	if err != nil {
		return nil, err
	}
	ofRedis, err := plotter.NewBarChart(redis, 4*vg.Millimeter)
	if err != nil {
		return nil, err
	}
	for _, c := range []struct {
		chart *plotter.BarChart
		color color.Color
		name  string
	}{{ofCaddy, caddyColor, "Caddy"}, {ofRedis, redisColor, "Redis"}} {
		c.chart.Horizontal, c.chart.Color, c.chart.LineStyle.Width = true, c.color, 0
		p.Legend.Add(c.name, c.chart)
	}
	ofRedis.StackOn(ofCaddy)
	p.Add(ofCaddy, ofRedis)
	p.Legend.Top = true
	return p, nil
}
