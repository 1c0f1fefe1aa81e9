"""Strict tools of any schema over HTTP: the model may call them with what their schemas allow, and nothing else."""

import pytest
from grids import drawn
from styles import STYLES, written
from three_apis import APIS, REFUSED, scripted_server

OWN_FORM = {dialect.name: style for style, (dialect, _, _) in STYLES.items() if dialect.tags or dialect.arguments}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count/anyOf/0"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
COUNT = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": False}
SCHEMAS = {
    "$ref": {"$ref": "#/$defs/place", "$defs": {"place": PLACE, "count": COUNT}},
    "allOf": {"allOf": [{"$ref": "#/$defs/place"}, {"type": "object"}], "$defs": {"place": PLACE, "count": COUNT}},
    "anyOf": {"anyOf": [ID, {"$ref": "#/$defs/place"}], "$defs": {"place": PLACE, "count": COUNT}},
}
QUESTION = [{"role": "user", "content": "How is it in Paris?"}]
GOOD, BAD = {"city": "Paris", "days": 3}, {"city": "Paris", "days": "x"}


def tool(schema):
    return {"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}


@pytest.fixture(scope="module")
def scripted(request, tmp_path_factory):
    """Returns a writer of answers with a call, and clients of a server whose model obeys grammars."""
    dialect, _, channels = STYLES[request.param]

    def write(arguments):
        call = written(dialect)(arguments, "weather")
        return lambda prompt: f"{channels.end if channels.opens(prompt) else ''}{call}"

    with scripted_server(tmp_path_factory.mktemp(request.param), request.param, obeys=True) as clients:
        yield write, clients


@pytest.mark.parametrize(
    "scripted, api, stream, name", drawn(OWN_FORM.values(), APIS, [False, True], SCHEMAS), indirect=["scripted"]
)
def test_a_strict_call_has_the_arguments_of_its_schema(scripted, api, stream, name):
    (write, clients), tools = scripted, [tool(SCHEMAS[name])]
    clients.answer = write(GOOD)
    said = clients.ask(api, QUESTION, tools, stream=stream)
    assert (said.calls, said.finish) == ([("weather", GOOD)], "tool_calls")
    for wrong in (BAD, {}):
        clients.answer = write(wrong)
        assert not clients.ask("chat", QUESTION, tools).calls


@pytest.mark.parametrize("scripted, api", drawn(OWN_FORM.values(), APIS), indirect=["scripted"])
def test_a_strict_schema_that_cannot_be_enforced_is_refused(scripted, api):
    _, clients = scripted
    for own in ({"$ref": "#/$defs/none"}, {"type": "string", "pattern": "a+"}):
        with pytest.raises(REFUSED, match="cannot be enforced"):
            clients.ask(api, QUESTION, [tool({"type": "object", "properties": {"city": own}})])
