//! Endpoints of the E2B API that are not there, by name: a client is told so, and not that there is no such path. They are in the document,
//! too, with 501 as their answer to who has shown a key.

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodFilter, on};
use utoipa::openapi::path::{OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{ContentBuilder, HttpMethod, OpenApi as Document, Ref, RefOr, Required, ResponseBuilder, Schema};

use crate::Error;
use crate::gateway::Gateway;

const DELETE: (MethodFilter, HttpMethod) = (MethodFilter::DELETE, HttpMethod::Delete);
const GET: (MethodFilter, HttpMethod) = (MethodFilter::GET, HttpMethod::Get);
const POST: (MethodFilter, HttpMethod) = (MethodFilter::POST, HttpMethod::Post);

/// Method, path, and what it is.
const UNSERVED: &[((MethodFilter, HttpMethod), &str, &str)] = &[
    (GET, "/secrets", "a list of secrets"),
    (POST, "/secrets", "a secret"),
    (GET, "/secrets/{secret}", "a secret"),
    (POST, "/secrets/{secret}", "a secret"),
    (DELETE, "/secrets/{secret}", "a secret"),
    (GET, "/teams", "a list of teams"),
    (GET, "/teams/{team}/metrics", "metrics of a team"),
    (GET, "/teams/{team}/metrics/max", "metrics of a team"),
    (GET, "/default-templates", "a list of default templates"),
    (POST, "/templates", "a build of a template by a Dockerfile"),
    (POST, "/v2/templates", "a build of a template by a Dockerfile"),
    (POST, "/templates/{template}", "a build of a template by a Dockerfile"),
    (
        POST,
        "/templates/{template}/builds/{build}",
        "a build of a template by a Dockerfile",
    ),
];

/// The routes of all of them.
pub(super) fn routes(mut router: Router<Arc<Gateway>>) -> Router<Arc<Gateway>> {
    for ((method, _), path, what) in UNSERVED {
        router = router.route(path, on(*method, move || async move { Error::NotServed(what) }));
    }
    router
}

/// Adds them to the document.
pub(super) fn describe(document: &mut Document) {
    for ((_, method), path, what) in UNSERVED {
        let mut operation = OperationBuilder::new().tag("unserved");
        for error in [Error::NotServed(what), Error::Unauthorized, Error::TooMany { after: 1 }] {
            let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Error")));
            let response = ResponseBuilder::new()
                .description(error.to_string())
                .content("application/json", content.build());
            operation = operation.response(error.status().as_str(), response.build());
        }
        // The same path under other names would be another one, and the document unsound.
        let served = document.paths.paths.keys().find(|served| shape(served) == shape(path));
        let path = served.cloned().unwrap_or_else(|| (*path).to_owned());
        for name in names(&path) {
            let text = RefOr::T(Schema::Object(ObjectBuilder::new().schema_type(Type::String).build()));
            let parameter = ParameterBuilder::new()
                .name(name)
                .parameter_in(ParameterIn::Path)
                .required(Required::True)
                .schema(Some(text));
            operation = operation.parameter(parameter);
        }
        let methods = vec![method.clone()];
        document.paths.add_path_operation(path, methods, operation.build());
    }
}

/// A path whatever its names are.
fn shape(path: &str) -> Vec<&str> {
    path.split('/')
        .map(|part| if part.starts_with('{') { "{}" } else { part })
        .collect()
}

/// What a path has names for.
fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_each_with_its_reason_and_its_names() {
        let document = serde_json::to_value(crate::api::document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for ((_, method), path, what) in UNSERVED {
            let method = serde_json::to_value(method).unwrap();
            let its: Vec<_> = paths.iter().filter(|(other, _)| shape(other) == shape(path)).collect();
            assert_eq!(its.len(), 1, "{path}");
            let operation = &its[0].1[method.as_str().unwrap()];
            let answers = operation["responses"].as_object().unwrap();
            assert_eq!(answers.keys().collect::<Vec<_>>(), ["401", "429", "501"], "{path}");
            assert!(answers["501"]["description"].as_str().unwrap().contains(what), "{path}");
            let told = operation["parameters"].as_array().map_or(0, Vec::len);
            assert_eq!(told, path.matches('{').count(), "{path}");
        }
    }
}
