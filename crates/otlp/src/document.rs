//! Spans as OTLP's JSON: `ExportTraceServiceRequest` of opentelemetry-proto in protobuf's JSON form, but for the ids, which
//! are hexadecimal (OTLP specification, "JSON Protobuf Encoding"). 64-bit numbers are strings there.

use std::collections::BTreeMap;

use observe::Span;
use serde_json::{Value, json};

/// `SPAN_KIND_INTERNAL`: enumerations are numbers (the same section).
const KIND_INTERNAL: u8 = 1;
/// `STATUS_CODE_ERROR`.
const STATUS_ERROR: u8 = 2;

/// One request with all of `spans`; `epoch_ns` is the time since 1970 at which CLOCK_MONOTONIC was zero.
pub fn document(spans: &[Span], version: &str, epoch_ns: u64) -> Value {
    let mut services: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for span in spans {
        services.entry(&span.service).or_default().push(one(span, epoch_ns));
    }
    let resources: Vec<Value> = services
        .into_iter()
        .map(|(service, spans)| {
            json!({
                "resource": { "attributes": [text("service.name", service), text("service.version", version)] },
                "scopeSpans": [{ "scope": { "name": "basalt", "version": version }, "spans": spans }],
            })
        })
        .collect();
    json!({ "resourceSpans": resources })
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn one(span: &Span, epoch_ns: u64) -> Value {
    let attributes: Vec<Value> = span.attributes.iter().map(|(key, value)| text(key, value)).collect();
    let time = |monotonic: u64| epoch_ns.saturating_add(monotonic).to_string();
    let mut value = json!({
        "traceId": span.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": KIND_INTERNAL,
        "startTimeUnixNano": time(span.start_ns),
        "endTimeUnixNano": time(span.end_ns),
        "attributes": attributes,
    });
    if let Some(parent) = span.parent {
        value["parentSpanId"] = json!(parent);
    }
    if let Some(error) = &span.error {
        value["status"] = json!({ "code": STATUS_ERROR, "message": error });
    }
    value
}
