// The openai-go package: asks a server for each feature and tells what came, a JSON line each.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

const (
	model    = "smol"
	question = "Which city is the capital of France?"
	long     = 1500
	many     = 12
)

var (
	ctx    = context.Background()
	client = openai.NewClient(
		option.WithBaseURL(os.Getenv("TANDEM_CLIENTS_URL")+"/v1"),
		option.WithAPIKey(os.Getenv("TANDEM_CLIENTS_KEY")),
		option.WithMaxRetries(0),
	)
	input = bufio.NewReader(os.Stdin)
)

func main() {
	chats()
	tools()
	structured()
	logprobs()
	embeddings()
	response()
	refusals()
	batch()
	cancel()
}

func tell(feature string, facts map[string]any) {
	facts["feature"] = feature
	line := must(json.Marshal(facts))
	fmt.Println(string(line))
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func looked() { // waits until the test has looked at the workers
	_, _ = input.ReadString('\n')
}

func asking(text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:       model,
		Messages:    []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
		Temperature: openai.Float(0),
		MaxTokens:   openai.Int(12),
	}
}

func chats() {
	whole := must(client.Chat.Completions.New(ctx, asking(question)))
	tell("chat", map[string]any{"text": whole.Choices[0].Message.Content})
	params := asking(question)
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Chat.Completions.NewStreaming(ctx, params)
	joined := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		joined.AddChunk(stream.Current())
	}
	must(0, stream.Err())
	tell("stream", map[string]any{"text": joined.Choices[0].Message.Content})
	counts := map[string]any{"whole": whole.Usage.PromptTokens, "streamed": joined.Usage.PromptTokens}
	tell("usage", counts)
}

func tools() {
	city := map[string]any{"type": "string", "enum": []string{"Paris", "Lyon"}}
	tool := openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "weather",
		Parameters: shared.FunctionParameters{
			"type":                 "object",
			"properties":           map[string]any{"city": city},
			"required":             []string{"city"},
			"additionalProperties": false,
		},
	})
	named := openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "weather"}
	choices := []openai.ChatCompletionToolChoiceOptionUnionParam{
		{OfFunctionToolChoice: &openai.ChatCompletionNamedToolChoiceParam{Function: named}},
		{OfAuto: openai.String("required")},
	}
	params := asking("How is the weather in Paris?")
	params.Tools = []openai.ChatCompletionToolUnionParam{tool}
	var calls []json.RawMessage
	for _, choice := range choices {
		params.ToolChoice = choice
		params.ParallelToolCalls = openai.Bool(false)
		params.MaxTokens = openai.Int(200)
		said := must(client.Chat.Completions.New(ctx, params)).Choices[0].Message
		call := said.ToolCalls[0]
		calls = append(calls, json.RawMessage(call.Function.Arguments))
		params.Messages = append(params.Messages, said.ToParam(), openai.ToolMessage("Sunny.", call.ID))
	}
	params.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("none")}
	params.MaxTokens = openai.Int(12)
	last := must(client.Chat.Completions.New(ctx, params))
	tell("tools", map[string]any{"calls": calls, "text": last.Choices[0].Message.Content})
}

func structured() {
	name := map[string]any{"type": "string", "enum": []string{"Paris", "Lyon"}}
	capital := map[string]any{"type": "boolean"}
	schema := map[string]any{
		"type":                 "object",
		"properties":           map[string]any{"name": name, "is_capital": capital},
		"required":             []string{"name", "is_capital"},
		"additionalProperties": false,
	}
	params := asking(question)
	params.MaxTokens = openai.Int(200)
	params.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{
		JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{
			Name: "city", Strict: openai.Bool(true), Schema: schema,
		},
	}
	answer := must(client.Chat.Completions.New(ctx, params))
	object := json.RawMessage(answer.Choices[0].Message.Content)
	tell("structured output", map[string]any{"object": object})
}

func logprobs() {
	params := asking(question)
	params.Logprobs = openai.Bool(true)
	params.TopLogprobs = openai.Int(2)
	var values, best []float64
	answer := must(client.Chat.Completions.New(ctx, params))
	for _, each := range answer.Choices[0].Logprobs.Content {
		values = append(values, each.Logprob)
		best = append(best, each.TopLogprobs[0].Logprob)
	}
	tell("logprobs", map[string]any{"logprobs": values, "best": best})
}

func embeddings() {
	texts := openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"Paris", "a cat"}}
	answer := must(client.Embeddings.New(ctx, openai.EmbeddingNewParams{Model: model, Input: texts}))
	var lengths []int
	for _, each := range answer.Data {
		lengths = append(lengths, len(each.Embedding))
	}
	tell("embeddings", map[string]any{"lengths": lengths})
}

func response() {
	params := responses.ResponseNewParams{
		Model:           model,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String(question)},
		MaxOutputTokens: openai.Int(16),
		Temperature:     openai.Float(0),
	}
	first := must(client.Responses.New(ctx, params))
	params.Input.OfString = openai.String("Sure?")
	params.PreviousResponseID = openai.String(first.ID)
	stream := client.Responses.NewStreaming(ctx, params)
	var second strings.Builder
	for stream.Next() {
		if event := stream.Current(); event.Type == "response.output_text.delta" {
			second.WriteString(event.Delta)
		}
	}
	must(0, stream.Err())
	tell("responses", map[string]any{"text": first.OutputText(), "second": second.String()})
}

func refusals() {
	hot, other := asking(question), asking(question)
	hot.Temperature = openai.Float(-1)
	other.Model = "nobody"
	_, bad := client.Chat.Completions.New(ctx, hot)
	_, key := client.Chat.Completions.New(ctx, asking(question), option.WithAPIKey("wrong"))
	_, unknown := client.Chat.Completions.New(ctx, other)
	var told []map[string]any
	for _, err := range []error{bad, key, unknown} {
		var refused *openai.Error
		if errors.As(err, &refused) {
			one := map[string]any{"status": refused.StatusCode, "message": refused.Message}
			one["kind"] = "openai.Error"
			told = append(told, one)
		}
	}
	tell("errors", map[string]any{"errors": told})
}

func batch() {
	counts := make([]int64, many)
	var all sync.WaitGroup
	for index := range many {
		all.Go(func() {
			text := strings.TrimSpace(strings.Repeat("word ", index+1))
			counts[index] = must(client.Chat.Completions.New(ctx, asking(text))).Usage.PromptTokens
		})
	}
	all.Wait()
	tell("batch", map[string]any{"counts": counts})
}

func cancel() {
	params := asking(question)
	params.MaxTokens = openai.Int(long)
	params.SetExtraFields(map[string]any{"ignore_eos": true})
	stream := client.Chat.Completions.NewStreaming(ctx, params)
	stream.Next()
	tell("cancel", map[string]any{"state": "running"})
	looked()
	must(0, stream.Close())
	tell("cancel", map[string]any{"state": "closed"})
	looked()
}
