//! Endpoints of the tag `tags`: which build a name with a tag stands for. A template has a tag once, so that its history is not told.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State as Shared};
use axum::response::{IntoResponse, Response};
use control::{Build, DEFAULT_TAG, Tag, Template};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Object;
use super::extract::{Body, Name, Query};
use super::failures::Failures;
use crate::Error;
use crate::auth::Principal;
use crate::builds::check_tags;
use crate::gateway::Gateway;
use crate::origin::split;
use crate::time_text;

/// Tags for a build.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = AssignTemplateTagsRequest)]
pub(crate) struct AssignTags {
    /// The build: `name` or `name:tag`.
    target: String,
    /// The tags that lead to it from now on.
    tags: Vec<String>,
}

/// Tags that lead to a build now.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AssignedTemplateTags)]
pub(crate) struct AssignedTags {
    /// They.
    tags: Vec<String>,
    /// The build.
    #[serde(rename = "buildID")]
    build_id: String,
}

/// Tags that are to lead nowhere.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = DeleteTemplateTagsRequest)]
pub(crate) struct DeleteTags {
    /// The template's name.
    name: String,
    /// They.
    tags: Vec<String>,
}

/// A tag.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateTag {
    /// The tag.
    tag: String,
    /// Its build.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Since when it leads there.
    #[schema(format = DateTime)]
    created_at: String,
}

/// How many tags there are.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TemplateTagsCountResponse)]
pub(crate) struct TagCount {
    /// So many.
    total: usize,
}

/// Whether there is a tag.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateTagExistsResponse)]
pub(crate) struct TagExists {
    /// It is there.
    exists: bool,
    /// The tag, as it is looked for.
    normalized_tag: String,
}

/// A build to which a tag leads.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateTagAssignment)]
pub(crate) struct Assignment {
    /// The build's id: a tag leads to one build.
    assignment_id: String,
    /// The same.
    build_id: String,
    /// Since when.
    #[schema(format = DateTime)]
    assigned_at: String,
    /// When the build was asked for.
    #[schema(format = DateTime)]
    build_created_at: String,
    /// When it came to its end.
    #[schema(format = DateTime, required)]
    build_finished_at: Option<String>,
}

/// What a tag leads to.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateTagAssignmentsResponse)]
pub(crate) struct Assignments {
    /// One, or none.
    data: Vec<Assignment>,
    /// There never is another page.
    #[schema(required)]
    next_cursor: Option<String>,
}

/// A tag with what it leads to.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateTagGroup)]
pub(crate) struct Group {
    /// The tag.
    tag: String,
    /// One.
    assignments: Vec<Assignment>,
    /// Never.
    has_more: bool,
}

/// Tags with what they lead to.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateTagGroupsResponse)]
pub(crate) struct Groups {
    /// All of them: a template has 100 at most.
    tags: Vec<Group>,
    /// There never is another page.
    #[schema(required)]
    next_cursor: Option<String>,
}

/// Which tag.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct TagQuery {
    /// The tag.
    tag: String,
}

/// Which tags, and in which order.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct GroupsQuery {
    /// Only those with this in them.
    search: Option<String>,
    /// `name_asc`, `name_desc`, `latest_asc` or `latest_desc`.
    sort: Option<String>,
}

fn no_tag(template: &Template, tag: &str) -> Error {
    Error::NotFound {
        what: "a build of the template",
        name: format!("{}:{tag}", template.name),
    }
}

async fn own(gateway: &Gateway, principal: &Principal, wanted: &str) -> Result<Template, Error> {
    gateway.need_template(&principal.tenant, wanted).await
}

async fn tags_of(gateway: &Gateway, template: &Template) -> Result<Vec<Tag>, Error> {
    let id = template.id.clone();
    gateway.store.with(move |store| store.tags(&id)).await
}

/// Have tags lead to a build.
#[utoipa::path(post, path = "/templates/tags", tag = "tags", request_body = AssignTags,
    responses((status = 201, body = AssignedTags), Failures))]
pub(crate) async fn assign(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Body(asked): Body<AssignTags>,
) -> Result<Response, Error> {
    if asked.tags.is_empty() {
        return Err(Error::invalid("`tags` is empty"));
    }
    check_tags(&asked.tags)?;
    let (name, tag) = split(&asked.target);
    let template = own(&gateway, &principal, name).await?;
    let all = tags_of(&gateway, &template).await?;
    let found = all.into_iter().find(|one| one.tag == tag);
    let build = found.ok_or_else(|| no_tag(&template, tag))?.build;
    let (id, to, tags) = (template.id.clone(), build.clone(), asked.tags.clone());
    let now = time_text::now_ns();
    let assigned = gateway.store.with(move |store| store.assign_tags(&id, &to, &tags, now));
    // Its last tag may have been removed meanwhile, and it with it.
    if !assigned.await? {
        return Err(no_tag(&template, tag));
    }
    gateway.remove_useless().await;
    let assigned = AssignedTags {
        tags: asked.tags,
        build_id: build,
    };
    let mut response = (StatusCode::CREATED, Json(assigned)).into_response();
    response.extensions_mut().insert(Object(asked.target));
    Ok(response)
}

/// Have tags lead nowhere. A build that has none left goes; sandboxes of it run on.
#[utoipa::path(delete, path = "/templates/tags", tag = "tags", request_body = DeleteTags, responses((status = 204), Failures))]
pub(crate) async fn remove(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Body(asked): Body<DeleteTags>,
) -> Result<Response, Error> {
    if asked.tags.is_empty() {
        return Err(Error::invalid("`tags` is empty"));
    }
    check_tags(&asked.tags)?;
    let (name, _) = split(&asked.name);
    let template = own(&gateway, &principal, name).await?;
    let all = tags_of(&gateway, &template).await?;
    if let Some(tag) = asked.tags.iter().find(|tag| !all.iter().any(|one| one.tag == **tag)) {
        return Err(no_tag(&template, tag));
    }
    let tags = asked.tags;
    gateway
        .store
        .with(move |store| store.remove_tags(&template.id, Some(&tags)))
        .await?;
    gateway.remove_useless().await;
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.extensions_mut().insert(Object(asked.name));
    Ok(response)
}

/// List the tags of a template, by name.
#[utoipa::path(get, path = "/templates/{templateID}/tags", tag = "tags", params(("templateID" = String, Path)),
    responses((status = 200, body = [TemplateTag]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<Vec<TemplateTag>>, Error> {
    let template = own(&gateway, &principal, &name).await?;
    let all = tags_of(&gateway, &template).await?;
    let shown = all.into_iter().map(|one| TemplateTag {
        tag: one.tag,
        build_id: one.build,
        created_at: time_text::text(one.assigned_ns),
    });
    Ok(Json(shown.collect()))
}

/// Count the tags of a template.
#[utoipa::path(get, path = "/templates/{templateID}/tags/count", tag = "tags", params(("templateID" = String, Path)),
    responses((status = 200, body = TagCount), Failures))]
pub(crate) async fn count(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<TagCount>, Error> {
    let template = own(&gateway, &principal, &name).await?;
    let total = tags_of(&gateway, &template).await?.len();
    Ok(Json(TagCount { total }))
}

/// Whether a template has a tag.
#[utoipa::path(get, path = "/templates/{templateID}/tags/exists", tag = "tags", params(("templateID" = String, Path), TagQuery),
    responses((status = 200, body = TagExists), Failures))]
pub(crate) async fn exists(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
    Query(query): Query<TagQuery>,
) -> Result<Json<TagExists>, Error> {
    let template = own(&gateway, &principal, &name).await?;
    let tag = match query.tag.as_str() {
        "" => DEFAULT_TAG.to_owned(),
        _ => query.tag,
    };
    check_tags(std::slice::from_ref(&tag))?;
    let all = tags_of(&gateway, &template).await?;
    Ok(Json(TagExists {
        exists: all.iter().any(|one| one.tag == tag),
        normalized_tag: tag,
    }))
}

fn assignment(tag: &Tag, builds: &[Build]) -> Option<Assignment> {
    let build = builds.iter().find(|build| build.id == tag.build)?;
    Some(Assignment {
        assignment_id: build.id.clone(),
        build_id: build.id.clone(),
        assigned_at: time_text::text(tag.assigned_ns),
        build_created_at: time_text::text(build.created_ns),
        build_finished_at: build.finished_ns.map(time_text::text),
    })
}

async fn with_builds(gateway: &Gateway, template: &Template) -> Result<(Vec<Tag>, Vec<Build>), Error> {
    let id = template.id.clone();
    gateway
        .store
        .with(move |store| Ok((store.tags(&id)?, store.builds(&id)?)))
        .await
}

/// List the tags of a template with the builds to which they lead.
#[utoipa::path(get, path = "/templates/{templateID}/tags/groups", tag = "tags", params(("templateID" = String, Path), GroupsQuery),
    responses((status = 200, body = Groups), Failures))]
pub(crate) async fn groups(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
    Query(query): Query<GroupsQuery>,
) -> Result<Json<Groups>, Error> {
    let template = own(&gateway, &principal, &name).await?;
    let (mut tags, builds) = with_builds(&gateway, &template).await?;
    tags.retain(|one| query.search.as_ref().is_none_or(|part| one.tag.contains(part)));
    match query.sort.as_deref() {
        None | Some("name_asc") => (),
        Some("name_desc") => tags.reverse(),
        Some("latest_asc") => tags.sort_by_key(|one| one.assigned_ns),
        Some("latest_desc") => tags.sort_by_key(|one| std::cmp::Reverse(one.assigned_ns)),
        Some(other) => {
            return Err(Error::invalid(format!(
                "`{other}` is no order: there are name_asc, name_desc, latest_asc and latest_desc"
            )));
        }
    }
    let group = |one: &Tag| Group {
        tag: one.tag.clone(),
        assignments: assignment(one, &builds).into_iter().collect(),
        has_more: false,
    };
    Ok(Json(Groups {
        tags: tags.iter().map(group).collect(),
        next_cursor: None,
    }))
}

/// What a tag of a template leads to.
#[utoipa::path(get, path = "/templates/{templateID}/tags/{tag}/assignments", tag = "tags",
    params(("templateID" = String, Path), ("tag" = String, Path)), responses((status = 200, body = Assignments), Failures))]
pub(crate) async fn assignments(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Path((name, tag)): Path<(String, String)>,
) -> Result<Json<Assignments>, Error> {
    let template = own(&gateway, &principal, &name).await?;
    let (tags, builds) = with_builds(&gateway, &template).await?;
    let found = tags.iter().find(|one| one.tag == tag);
    let found = found.ok_or_else(|| no_tag(&template, &tag))?;
    Ok(Json(Assignments {
        data: assignment(found, &builds).into_iter().collect(),
        next_cursor: None,
    }))
}
