//! What browsers must be told before they let a page of another origin ask, as the SDK for JavaScript does: anybody's page may, since
//! nothing is answered for without a token that pages must send themselves. Knows no service.

use axum::body::Body;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, VARY,
};
use http::{HeaderMap, HeaderValue, Response, StatusCode};

/// What is sent where a page does not say which headers it wants to send: the star stands for all but `Authorization`.
const HEADERS: HeaderValue = HeaderValue::from_static("*, Authorization");

/// Answers the question that browsers ask first.
pub(crate) fn preflight(headers: &HeaderMap) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let answer = response.headers_mut();
    answer.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(HEADERS));
    answer.insert(
        ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE"),
    );
    answer.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    answer.insert(VARY, HeaderValue::from_static("Access-Control-Request-Headers"));
    response
}

/// Lets every page read an answer.
pub(crate) fn open(response: &mut Response<Body>) {
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_may_send_the_headers_that_it_asks_for() {
        let mut asked = HeaderMap::new();
        assert_eq!(preflight(&asked).headers()[ACCESS_CONTROL_ALLOW_HEADERS], HEADERS);
        let names = HeaderValue::from_static("authorization,connect-protocol-version");
        asked.insert(ACCESS_CONTROL_REQUEST_HEADERS, names.clone());
        let response = preflight(&asked);
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_HEADERS], names);
    }
}
