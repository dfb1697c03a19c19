"""What compare.py and table.py make of documents and logs. Run by the step `e2b-api`: `python -m unittest discover -p self_test.py`."""

import unittest

import compare
import facts
import table

LOG = """
basalt-gateway: debug: gateway::server: request api GET /health 200 90 us "basalt-test/begin python test_a"
basalt-gateway: debug: gateway::server: request api GET /sandboxes/metrics 200 90 us "e2b-python-sdk/2.63.0"
basalt-gateway: debug: gateway::server: request api GET /sandboxes/0123 404 90 us "e2b-python-sdk/2.63.0"
basalt-gateway: debug: gateway::server: request envd 0123456789ab POST /process.Process/Start 200 90 us "connectrpc/0.12.1"
basalt-gateway: debug: gateway::server: request envd 0123456789ab GET /files 200 90 us ""
basalt-gateway: debug: gateway::server: request api GET /health 200 90 us "basalt-test/end"
basalt-gateway: debug: gateway::server: request api GET /sandboxes 200 90 us "e2b-python-sdk/2.63.0"
basalt-gateway: debug: gateway::server: request api GET /health 200 90 us "basalt-test/begin javascript a > b"
basalt-gateway: debug: gateway::server: request api GET /sandboxes/0123 200 90 us "e2b-js-sdk/2.51.0"
"""
KNOWN = {
    "api": ["GET /sandboxes", "GET /sandboxes/metrics", "GET /sandboxes/{}", "GET /teams"],
    "envd": ["GET /files", "POST /process.Process/Start"],
}
REASONS = {"GET /teams": "not served"}


class Table(unittest.TestCase):
    def setUp(self):
        self.found = table.exercised(LOG.splitlines(), KNOWN)

    def test_what_the_sdks_asked_for_in_a_test_and_got(self):
        self.assertEqual(self.found["python"], {"GET /sandboxes/metrics": {"test_a"}, "POST /process.Process/Start": {"test_a"}})
        self.assertEqual(self.found["javascript"], {"GET /sandboxes/{}": {"a > b"}})

    def test_a_page_that_was_made_of_a_run_is_borne_out_by_it_and_by_no_other(self):
        page = "".join(table.table(table.rows(KNOWN[kind], self.found, REASONS), {}) + "\n\n" for kind in KNOWN)
        self.assertIn("| `GET /sandboxes/metrics` | test_a | no | no |", page)
        self.assertEqual(list(table.wrong(page, KNOWN, self.found, REASONS)), [])
        nothing = table.exercised([], KNOWN)
        self.assertEqual(len(list(table.wrong(page, KNOWN, nothing, REASONS))), 3)
        self.assertEqual(len(list(table.wrong(page, KNOWN, self.found, {}))), 1)
        self.assertEqual(len(list(table.wrong(page.replace("test_a", "test_b +3"), KNOWN, self.found, REASONS))), 2)
        self.assertEqual(len(list(table.wrong("", KNOWN, self.found, REASONS))), 6)


class Compare(unittest.TestCase):
    def test_references_parts_and_choices_are_one_schema(self):
        schemas = {
            "A": {"allOf": [{"$ref": "#/components/schemas/B"}, {"properties": {"c": {}}, "required": ["c"]}]},
            "B": {"type": "object", "properties": {"b": {"oneOf": [{"type": "null"}, {"type": "string"}]}}, "required": ["b"]},
        }
        document = compare.Document({"paths": {}, "components": {"schemas": schemas}})
        whole = document.whole({"$ref": "#/components/schemas/A"})
        self.assertEqual((set(whole["properties"]), whole["required"]), ({"b", "c"}, {"b", "c"}))
        self.assertEqual(document.whole(whole["properties"]["b"])["types"], {"string"})

    def test_an_operation_without_an_answer_but_501_is_not_served(self):
        answers = {"401": {}, "501": {"description": "teams are not served"}}
        document = compare.Document({"paths": {"/teams": {"get": {"responses": answers}, "post": {"responses": answers | {"201": {}}}}}})
        self.assertEqual(document.unserved("GET /teams"), "teams are not served")
        self.assertIsNone(document.unserved("POST /teams"))

    def test_operations_have_the_names_of_their_paths(self):
        document = compare.Document({"paths": {"/a/{b}/c/{d}": {"get": {}}}})
        self.assertEqual(document.names, {"GET /a/{}/c/{}": "GET /a/{b}/c/{d}"})

    def test_a_body_that_an_sdk_sends_and_the_document_lacks_is_a_difference(self):
        operation = facts.Operation("post", "/a", body=object)
        document = compare.Document({"paths": {"/a": {"post": {"responses": {}}}}})
        self.assertEqual(list(compare.differs(document, "POST /a", operation)), ["body is not read"])


if __name__ == "__main__":
    unittest.main()
