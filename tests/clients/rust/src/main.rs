//! The async-openai crate: asks a server for each feature and tells what came, a JSON line each.
use std::env;
use std::io::stdin;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, CreateChatCompletionRequest};
use async_openai::types::responses::ResponseStreamEvent;
use futures::StreamExt;
use futures::future::join_all;
use serde::de::DeserializeOwned;
use serde_json::{Value, json, to_value};

const QUESTION: &str = "Which city is the capital of France?";
const LONG: u32 = 1500;
const MANY: usize = 12;

type Outcome = Result<(), Box<dyn std::error::Error>>;
type Asked = Client<OpenAIConfig>;

#[tokio::main]
async fn main() -> Outcome {
    let key = env::var("TANDEM_CLIENTS_KEY")?;
    let asked = client(&key)?;
    chats(&asked).await?;
    tools(&asked).await?;
    structured(&asked).await?;
    logprobs(&asked).await?;
    embeddings(&asked).await?;
    responses(&asked).await?;
    errors(&asked, &client("wrong")?).await?;
    batch(&asked).await?;
    cancel(&asked).await
}

fn client(key: &str) -> Result<Asked, env::VarError> {
    let base = format!("{}/v1", env::var("TANDEM_CLIENTS_URL")?);
    Ok(Client::with_config(OpenAIConfig::new().with_api_base(base).with_api_key(key)))
}

fn tell(feature: &str, mut facts: Value) {
    facts["feature"] = json!(feature);
    println!("{facts}");
}

/// Waits until the test has looked at the workers.
fn looked() -> Outcome {
    stdin().read_line(&mut String::new())?;
    Ok(())
}

/// The crate's own type of a request, with what `more` says otherwise.
fn typed<T: DeserializeOwned>(mut common: Value, more: Value) -> Result<T, serde_json::Error> {
    if let (Some(all), Value::Object(more)) = (common.as_object_mut(), more) {
        all.extend(more);
    }
    serde_json::from_value(common)
}

fn chat(more: Value) -> Result<CreateChatCompletionRequest, serde_json::Error> {
    let messages = json!([{"role": "user", "content": QUESTION}]);
    let common = json!({"model": "smol", "messages": messages, "temperature": 0.0, "max_tokens": 12});
    typed(common, more)
}

async fn chats(client: &Asked) -> Outcome {
    let whole = client.chat().create(chat(json!({}))?).await?;
    tell("chat", json!({"text": whole.choices[0].message.content}));
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let mut stream = client.chat().create_stream(chat(options)?).await?;
    let (mut text, mut streamed) = (String::new(), 0);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        for choice in &chunk.choices {
            text += choice.delta.content.as_deref().unwrap_or("");
        }
        streamed = chunk.usage.map_or(streamed, |usage| usage.prompt_tokens);
    }
    tell("stream", json!({"text": text}));
    let counted = whole.usage.map(|usage| usage.prompt_tokens);
    tell("usage", json!({"whole": counted, "streamed": streamed}));
    Ok(())
}

async fn tools(client: &Asked) -> Outcome {
    let city = json!({"type": "string", "enum": ["Paris", "Lyon"]});
    let parameters = json!({"type": "object", "properties": {"city": city}, "required": ["city"],
        "additionalProperties": false});
    let tools =
        json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    let mut messages = vec![json!({"role": "user", "content": "How is the weather in Paris?"})];
    let mut calls = Vec::new();
    for choice in
        [json!({"type": "function", "function": {"name": "weather"}}), json!("required")]
    {
        let more = json!({"messages": messages, "tools": tools, "tool_choice": choice,
            "parallel_tool_calls": false, "max_tokens": 200});
        let said = client.chat().create(chat(more)?).await?.choices.remove(0).message;
        let made = said.tool_calls.clone().unwrap_or_default();
        let Some(ChatCompletionMessageToolCalls::Function(call)) = made.first() else {
            return Err("no call came".into());
        };
        calls.push(serde_json::from_str::<Value>(&call.function.arguments)?);
        messages.push(json!({"role": "assistant", "tool_calls": to_value(&made)?}));
        messages.push(json!({"role": "tool", "tool_call_id": call.id, "content": "Sunny."}));
    }
    let more = json!({"messages": messages, "tools": tools, "tool_choice": "none"});
    let last = client.chat().create(chat(more)?).await?;
    tell("tools", json!({"calls": calls, "text": last.choices[0].message.content}));
    Ok(())
}

async fn structured(client: &Asked) -> Outcome {
    let name = json!({"type": "string", "enum": ["Paris", "Lyon"]});
    let properties = json!({"name": name, "is_capital": {"type": "boolean"}});
    let schema = json!({"type": "object", "properties": properties,
        "required": ["name", "is_capital"], "additionalProperties": false});
    let format = json!({"type": "json_schema",
        "json_schema": {"name": "city", "strict": true, "schema": schema}});
    let more = json!({"response_format": format, "max_tokens": 200});
    let answer = client.chat().create(chat(more)?).await?;
    let text = answer.choices[0].message.content.as_deref().unwrap_or("");
    tell("structured output", json!({"object": serde_json::from_str::<Value>(text)?}));
    Ok(())
}

async fn logprobs(client: &Asked) -> Outcome {
    let more = json!({"logprobs": true, "top_logprobs": 2});
    let answer = client.chat().create(chat(more)?).await?;
    let content = answer.choices[0].logprobs.as_ref().and_then(|all| all.content.as_ref());
    let content = content.ok_or("no log-probabilities came")?;
    let values: Vec<f32> = content.iter().map(|each| each.logprob).collect();
    let best: Vec<f32> = content.iter().map(|each| each.top_logprobs[0].logprob).collect();
    tell("logprobs", json!({"logprobs": values, "best": best}));
    Ok(())
}

async fn embeddings(client: &Asked) -> Outcome {
    let request = typed(json!({"model": "smol", "input": ["Paris", "a cat"]}), json!({}))?;
    let answer = client.embeddings().create(request).await?;
    let lengths: Vec<usize> = answer.data.iter().map(|each| each.embedding.len()).collect();
    tell("embeddings", json!({"lengths": lengths}));
    Ok(())
}

async fn responses(client: &Asked) -> Outcome {
    let common = json!({"model": "smol", "max_output_tokens": 16, "temperature": 0.0});
    let request = typed(common.clone(), json!({"input": QUESTION}))?;
    let first = client.responses().create(request).await?;
    let more = json!({"input": "Sure?", "previous_response_id": first.id, "stream": true});
    let mut stream = client.responses().create_stream(typed(common, more)?).await?;
    let mut second = String::new();
    while let Some(event) = stream.next().await {
        if let ResponseStreamEvent::ResponseOutputTextDelta(event) = event? {
            second += &event.delta;
        }
    }
    tell("responses", json!({"text": first.output_text(), "second": second}));
    Ok(())
}

async fn errors(client: &Asked, wrong: &Asked) -> Outcome {
    let cases = [
        (client, json!({"temperature": -1.0})),
        (wrong, json!({})),
        (client, json!({"model": "nobody"})),
    ];
    let mut errors = Vec::new();
    for (client, more) in cases {
        if let Err(OpenAIError::ApiError(error)) = client.chat().create(chat(more)?).await {
            errors.push(json!({"status": error.status_code.as_u16(),
                "message": error.api_error.message, "kind": "OpenAIError::ApiError"}));
        }
    }
    tell("errors", json!({"errors": errors}));
    Ok(())
}

async fn batch(client: &Asked) -> Outcome {
    let asked = (1..=MANY).map(|number| async move {
        let text = vec!["word"; number].join(" ");
        let request = chat(json!({"messages": [{"role": "user", "content": text}]}))?;
        let answer = client.chat().create(request).await?;
        Ok::<_, Box<dyn std::error::Error>>(answer.usage.map(|usage| usage.prompt_tokens))
    });
    let counts: Result<Vec<_>, _> = join_all(asked).await.into_iter().collect();
    tell("batch", json!({"counts": counts?}));
    Ok(())
}

async fn cancel(client: &Asked) -> Outcome {
    let story = json!([{"role": "user", "content": "Write a very long story."}]);
    let more = json!({"messages": story, "max_tokens": LONG, "stream": true});
    let mut stream = client.chat().create_stream(chat(more)?).await?;
    stream.next().await;
    tell("cancel", json!({"state": "running"}));
    looked()?;
    drop(stream);
    tell("cancel", json!({"state": "closed"}));
    looked()
}
