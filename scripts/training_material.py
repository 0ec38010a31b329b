"""Words that `training_prompts.py` makes prompts of. Nothing here is in the benchmark's prompts."""

from __future__ import annotations

# --- chat: things that one does, and things that one asks about ---------------------------------

ACTIVITIES = """
growing tomatoes on a balcony|keeping houseplants alive|learning to swim as an adult|writing a
short story|starting a vegetable garden|training for a ten kilometre run|saving money on
groceries|learning Spanish|sleeping better|preparing for a job interview|cooking for a large
family|repairing a bicycle|painting a bedroom|organising a small kitchen|planning a wedding on a
budget|reading more books|giving a speech in public|learning to draw|choosing a first laptop|
moving to another country|making new friends in a city|adopting a rescue dog|writing a cover
letter|studying for a chemistry exam|camping with small children|making cheese at home|brewing
good coffee|losing weight slowly|knitting a scarf|building a bookshelf|taking better portraits|
hiking in the rain|managing a household budget|teaching a child to read|meditating every day|
packing for a long flight|hosting a dinner party|fixing a leaking tap|running a book club|
learning to play chess|decluttering a garage|starting a podcast|volunteering at a food bank|
cooking with lentils|keeping a diary|growing herbs indoors|learning to type fast|caring for an
old computer|choosing running shoes|riding a horse|making jam|setting up a home office|learning
touch rugby|asking for a raise|remembering names|planning meals for a week|starting a small
online shop|quitting sugar|working night shifts|learning sign language|writing a poem|learning
to juggle|sewing a button|cleaning an oven|making a family tree|buying a used car|reading maps|
learning to sail a dinghy|tuning a guitar|making candles|learning to dance the tango|feeding a
toddler|dealing with a noisy flatmate|preparing for winter|insulating an attic|growing mushrooms|
making soap|learning to code|keeping a fish tank|shopping for a mattress|caring for curly hair|
stretching before exercise|doing taxes for the first time|renting out a spare room|making pasta
from scratch|learning to whistle|collecting stamps|designing a logo|restoring a wooden chair|
planning a school reunion|making a budget for a student|mentoring a new colleague|learning
calligraphy|organising a charity run|raising chickens|composting kitchen waste|learning to ski
at forty|pruning roses|keeping a sourdough culture|writing a thank-you note|staying calm in
traffic
"""

SUBJECTS = """
photosynthesis|the water cycle|how vaccines work|black holes|the French Revolution|supply and
demand|machine learning|the human heart|plate tectonics|the Roman Empire|electric cars|the
theory of evolution|how airplanes fly|inflation|the solar system|democracy|renewable energy|the
Great Wall of China|how computers store data|gravity|the immune system|world trade|the printing
press|antibiotics|climate change|probability|the Industrial Revolution|how batteries work|DNA|
earthquakes|the stock market|Renaissance art|the moon landing|how the internet works|coral reefs|
the digestive system|ancient Egypt|prime numbers|how engines work|the Silk Road|nuclear power|
the nitrogen cycle|jazz music|the Olympic Games|how glass is made|the periodic table|migration
of birds|the Cold War|encryption|the history of chocolate|rainforests|how memory works|the
carbon cycle|tides|fractions|impressionism|the Vikings|how soap cleans|magnetism|the United
Nations|volcanoes|desert animals|the invention of paper|how muscles grow|sound waves|the samurai|
permafrost|statistics in sport|interest rates|the human eye|penguins|how rockets work|algorithms|
philosophy of Stoicism|the Mediterranean diet|wind turbines|how bridges stand up|glaciers|the
Aztecs|kidneys|cloud computing|the Pythagorean theorem|bacteria and viruses|the history of
football|how concrete hardens|dinosaurs|the Amazon river|blockchain|time zones|origami|how
refrigerators work|Shakespeare's tragedies|hurricanes|the brain's two halves|recycling plastic|
sharks|how cheese is made|the Suez Canal|symmetry|3D printing|the common cold|how laws are made|
the history of money|spiders|acids and bases
"""

ACTIVITY_ASKS = [
    "Give me five practical tips for {}.",
    "What are the most common mistakes people make when {}, and how can I avoid them?",
    "I have never tried {} before. Where should I begin?",
    "Write a short guide to {} for beginners.",
    "Can you make a step-by-step plan for {} over the next month?",
    "What equipment do I need for {}?",
    "My friend says that {} is easy, but I find it hard. What am I doing wrong?",
    "List the advantages and disadvantages of {}.",
    "How much time and money does {} usually take?",
    "Write a friendly email inviting a colleague to join me in {}.",
    "Write a motivating paragraph about {}.",
    "Tell me a funny story about someone {}.",
    "Write a dialogue between a teacher and a student about {}.",
    "What would an expert say about {}?",
    "Is {} worth the effort? Explain your opinion.",
    "Make a checklist for {}.",
    "Write a blog post introduction about {}.",
    "Please compare two different approaches to {}.",
    "How do I stay motivated while {}?",
    "Write a short poem about {}.",
    "I only have fifteen minutes a day. How can I make progress with {}?",
    "What should I know about safety when {}?",
    "Explain {} to someone who is seventy years old.",
    "Suggest three books or kinds of videos that help with {}.",
    "Write a weekly schedule that leaves room for {}.",
    "Write a product description for a box that contains everything needed for {}.",
    "What questions should I ask a professional about {}?",
    "How has {} changed in the last fifty years?",
]

SUBJECT_ASKS = [
    "Explain {} in simple words.",
    "What is the most important thing to understand about {}?",
    "Write an essay of three paragraphs about {}.",
    "Give me a short history of {}.",
    "What are some common misconceptions about {}?",
    "Create a quiz of five questions, with answers, about {}.",
    "Explain {} to a ten-year-old child.",
    "Why does {} matter today?",
    "Write a lesson plan for teaching {} to teenagers.",
    "Give an example from everyday life that shows {}.",
    "Write three interesting facts about {}.",
    "What would the world be like without {}?",
    "Describe {} as if you were a reporter on the radio.",
    "Which key terms should I know to talk about {}? Define each briefly.",
    "Write a short rhyming poem on {}.",
    "Who were the people who shaped our knowledge of {}?",
    "Compare {} with something from daily life.",
    "What are the open questions about {}?",
    "Tell me about {} in exactly five sentences.",
    "Make a table with the main facts about {}.",
    "Write the opening of a documentary on {}.",
    "What careers are related to {}?",
    "Debate: give one argument for and one against the importance of {}.",
    "How do scientists or scholars study {}?",
    "Write a conversation between two friends who disagree about {}.",
]

FREE_ASKS = [
    "Tell me a story about {a} and {b}.",
    "Write a fairy tale in which {a} meets {b}.",
    "Invent a dialogue between {a} and {b}.",
    "Write a letter from {a} to {b}.",
    "Describe a day in the life of {a}.",
    "What would {a} say to {b} after a long journey?",
    "Write a limerick about {a}.",
    "Write the first page of a mystery novel with {a} and {b}.",
]

CHARACTERS = """
a retired pilot|a clumsy wizard|a brave librarian|a lonely robot|an honest thief|a talking
umbrella|a tired nurse|a young inventor|a forgetful detective|a shy dragon|a stubborn farmer|a
curious astronaut|a grumpy baker's apprentice|a street musician|a queen without a country|a
snail who loves speed|a ghost afraid of people|two rival gardeners|a postman in the mountains|a
clever fox|an old clockmaker|a girl who collects sounds|a firefighter on holiday|a painter who
lost her colours|a submarine cook|a taxi driver at midnight|a puppet with a secret|the last tree
on a hill|a nervous juggler|a boy who speaks to rivers
"""

# --- code ----------------------------------------------------------------------------------------

CODE_TASKS = """
checks whether a number is prime|reverses the words of a sentence|counts the vowels in a text|
returns the n-th Fibonacci number|finds the largest two numbers in a list|removes duplicates
from a list while keeping the order|merges two sorted lists|checks whether two strings are
anagrams|converts Celsius to Fahrenheit|reads a CSV file and prints the average of a column|
computes the factorial of a number|checks whether a string is a palindrome|flattens a nested
list|finds the most frequent word in a text|sorts a list of dictionaries by a key|generates a
random password|validates an email address|counts the lines in a file|computes the greatest
common divisor|transposes a matrix|implements binary search|implements bubble sort|converts a
number to Roman numerals|finds missing numbers in a sequence|rotates a list by k places|
calculates the distance between two points|groups numbers into even and odd|parses a date string|
removes punctuation from a text|finds the intersection of two lists|computes compound interest|
prints a multiplication table|checks for balanced brackets|downloads a file from a URL|
implements a queue with two lists|converts binary to decimal|computes the median of a list|
splits a list into chunks|capitalises every word|finds all files with a given extension|
simulates rolling two dice|draws a triangle of stars|counts how often each letter occurs|
implements a simple bank account class|implements a linked list|writes a dictionary to a JSON
file|measures the running time of another function|finds the shortest path in a grid|retries a
call three times|formats seconds as hours and minutes|computes a running maximum|replaces tabs
by spaces|finds the longest common prefix|implements a simple cache|returns the digits of a
number as a list
"""

LANGUAGES = ["Python", "Python", "Python", "JavaScript", "Java", "C++", "Go", "TypeScript", "Ruby"]

CODE_ASKS = [
    "Write a {lang} function that {task}.",
    "Write a {lang} program that {task}, with comments.",
    "How do I write code in {lang} that {task}? Show an example of its use.",
    "Implement a {lang} function which {task}, then explain how it works.",
    "Please show me two ways to write a {lang} function that {task}.",
    "In {lang}, write a function that {task}, and handle invalid input.",
]

FUNCTIONS = [
    ("Python", "def area(radius):\n    return 3.14159 * radius * radius"),
    ("Python", "def greet(name):\n    print('Hello, ' + name + '!')"),
    ("Python", "def total(prices):\n    s = 0\n    for p in prices:\n        s = s + p\n"
     "    return s"),
    ("Python", "def is_even(n):\n    if n % 2 == 0:\n        return True\n    else:\n"
     "        return False"),
    ("Python", "def find(items, wanted):\n    for i in range(len(items)):\n"
     "        if items[i] == wanted:\n            return i\n    return -1"),
    ("Python", "def count(text):\n    result = {}\n    for c in text:\n        if c in result:\n"
     "            result[c] += 1\n        else:\n            result[c] = 1\n    return result"),
    ("Python", "class Counter:\n    def __init__(self):\n        self.value = 0\n\n"
     "    def step(self):\n        self.value += 1\n        return self.value"),
    ("Python", "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n"
     "        return high\n    return x"),
    ("Python", "def squares(n):\n    out = []\n    for i in range(n):\n        out.append(i * i)\n"
     "    return out"),
    ("Python", "def load(path):\n    f = open(path)\n    text = f.read()\n    f.close()\n"
     "    return text.split('\\n')"),
    ("Python", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("Python", "def mean(xs):\n    return sum(xs) / len(xs)"),
    ("JavaScript", "function add(a, b) {\n  return a + b;\n}"),
    ("JavaScript", "function double(list) {\n  var out = [];\n"
     "  for (var i = 0; i < list.length; i++) {\n    out.push(list[i] * 2);\n"
     "  }\n  return out;\n}"),
    ("JavaScript", "function isEmpty(text) {\n  if (text === '' || text === null) {\n"
     "    return true;\n  }\n  return false;\n}"),
    ("JavaScript", "const users = [{name: 'Ada', age: 36}, {name: 'Alan', age: 41}];\n"
     "for (const user of users) {\n  console.log(user.name + ' is ' + user.age);\n}"),
    ("Java", "public static int max(int[] values) {\n    int best = values[0];\n"
     "    for (int v : values) {\n        if (v > best) best = v;\n    }\n    return best;\n}"),
    ("Java", "public class Point {\n    private int x, y;\n    public Point(int x, int y) {\n"
     "        this.x = x;\n        this.y = y;\n    }\n    public int getX() { return x; }\n}"),
    ("C++", "int sum(const std::vector<int>& v) {\n  int s = 0;\n  for (int x : v) s += x;\n"
     "  return s;\n}"),
    ("C++", "void swap(int* a, int* b) {\n  int t = *a;\n  *a = *b;\n  *b = t;\n}"),
    ("Go", "func Abs(x int) int {\n\tif x < 0 {\n\t\treturn -x\n\t}\n\treturn x\n}"),
    ("SQL", "SELECT name, salary FROM employees WHERE salary > 50000 ORDER BY salary DESC;"),
    ("SQL", "SELECT department, COUNT(*) FROM employees GROUP BY department;"),
    ("HTML", "<ul>\n  <li>Milk</li>\n  <li>Eggs</li>\n  <li>Bread</li>\n</ul>"),
]  # fmt: skip

GIVEN_ASKS = [
    "Explain what this {lang} code does:\n\n{code}",
    "Add comments to the following {lang} code:\n\n{code}",
    "Rewrite this {lang} code so that it is shorter:\n\n{code}",
    "Find possible bugs in this {lang} code and fix them:\n\n{code}",
    "Translate this {lang} code to {other}:\n\n{code}",
    "Write a test for this {lang} code:\n\n{code}",
    "Use better names in this {lang} code and show the result:\n\n{code}",
    "Make this {lang} code check its input:\n\n{code}",
    "What is the time complexity of this {lang} code?\n\n{code}",
    "Extend this {lang} code with one useful feature and print all of it:\n\n{code}",
]

# --- texts to rewrite, summarise and ask about ----------------------------------------------------

PEOPLE = """
Rosa|Ahmed|Mei|Carlos|Ingrid|Kofi|Priya|Dmitri|Leila|Hugo|Yuki|Samuel|Fatima|George|Nadia|Victor|
Amara|Henrik|Olga|Rafael
"""
PLACES = """
Lisbon|a village near Kyoto|northern Canada|the outskirts of Nairobi|Santiago|a valley in
Austria|Cairo|the island of Crete|Glasgow|Melbourne|a suburb of Chicago|Krakow|Jakarta|the
Scottish Highlands|Oaxaca|Helsinki|a district of Mumbai|Marrakesh|the coast of Brittany|Vancouver
"""
ROLES = """
carpenter|biology teacher|taxi driver|dentist|software engineer|florist|translator|plumber|
photographer|nurse|history student|chef|architect|farmer|electrician|journalist|tailor|
accountant|violinist|mechanic
"""
THINGS = """
a folding bicycle|a small bakery oven|an electric kettle|a second-hand camera|a solar panel|a
pair of boots|a weather station|a sewing machine|a tablet computer|a wood stove|a garden shed|a
water filter|a sound system|a microscope|a standing desk|a rain barrel|a coffee grinder|an
espresso machine|a tent|a violin
"""
VERBS = """
bought|built|repaired|sold|borrowed|tested|designed|lost and found again|gave away|restored
"""
FEELINGS = (
    """surprised|disappointed|delighted|worried|curious|relieved|annoyed|proud|nervous|grateful"""
)
REASONS = """
because the old one had broken|because a neighbour had recommended it|after reading about it in
a magazine|to save money in the long run|for a school project|to help a friend|because the
winter had been long|after losing a bet|to celebrate a birthday|because nothing else was left in
the shop
"""
RESULTS = """
It worked well for the first month and then needed a new part|Most people in the street came to
look at it|The cost turned out to be twice what had been expected|It saves about two hours every
week|Nobody used it in the end|The instructions were only in German, so it took a whole weekend|
The local newspaper wrote a short article about it|It is now kept in the cellar and used on
Sundays|Since then three others have done the same|The company replaced it free of charge
"""
NUMBERS = ["12", "35", "48", "90", "120", "250", "400", "1,500", "3,200", "18"]
MONTHS = ["January", "February", "April", "May", "June", "August", "September", "November"]
FACTS = """
Elephants can hear sounds that are too low for humans. They use them to talk to each other over
several kilometres|Honey does not spoil if it is kept dry. Jars found in old tombs could still
be eaten|Bamboo is a grass, and some kinds grow almost a metre in one day. It is used for
houses, paper and food|The first traffic lights were lit by gas. One of them exploded after less
than a month|Octopuses have three hearts. Two of them stop when the animal swims, so it prefers
to crawl|Tea was first drunk as a medicine. Only much later did it become an everyday drink|Snow
is made of clear crystals. It looks white because the light is scattered in all directions|The
first computers filled whole rooms. A modern phone is millions of times faster|Camels store fat,
not water, in their humps. They can drink a hundred litres in a few minutes|Salt was once so
valuable that soldiers were partly paid with it. The word salary comes from that time|Paper was
invented in China about two thousand years ago. For centuries the method was kept secret|The
Sahara was once green. Rock paintings show cattle, boats and people swimming|Bananas are
slightly radioactive because they contain potassium. The amount is far too small to matter|Sleep
helps the brain to store what it has learnt. People who sleep too little forget more|Coffee
plants came from Ethiopia. From there they travelled to Yemen and later around the world|A day
on Venus is longer than its year. The planet also turns in the other direction|Sea otters hold
hands while they sleep. That way they do not drift apart|Rubber was named by a chemist who saw
that it rubs out pencil marks. Before that people used bread|The Eiffel Tower grows by several
centimetres in summer. Iron expands when it is warm|Chess came to Europe from India by way of
Persia. The rules for the queen are only about five hundred years old
"""

REWRITE_ASKS = [
    "Rewrite the following text in a more formal style:\n\n{text}",
    "Make this text sound friendlier:\n\n{text}",
    "Correct any errors in this text and print the corrected version:\n\n{text}",
    "Rewrite this text in the first person:\n\n{text}",
    "Shorten this text without losing information:\n\n{text}",
    "Rewrite this so that a child can understand it:\n\n{text}",
    "Turn this text into bullet points:\n\n{text}",
    "Proofread the text below. Output only the improved text.\n\n{text}",
    "Paraphrase this passage:\n\n{text}",
    "Rewrite this text as a news report:\n\n{text}",
    "Replace the names in this text by other names and keep the rest:\n\n{text}",
    "Make the sentences in this text longer and more vivid:\n\n{text}",
    "Rewrite the text in the future tense:\n\n{text}",
    "Turn the following notes into a letter:\n\n{text}",
]

SUMMARY_ASKS = [
    "Summarize the following passage in one sentence:\n\n{text}",
    "What is the main idea of this passage?\n\n{text}",
    "Write a headline and a one-sentence summary for this text:\n\n{text}",
    "Give a brief summary of the text below.\n\n{text}",
    "TL;DR:\n\n{text}",
    "List the key points of the passage:\n\n{text}",
]

QUESTIONS = [
    "Who is this passage about, and what did they do?",
    "Where does this take place?",
    "What was the result?",
    "Why was it done?",
    "When did it happen?",
    "What can we learn from this passage?",
    "Which number is mentioned, and what does it stand for?",
    "How did the person feel?",
]

QUESTION_ASKS = [
    "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion: {question}",
    "{text}\n\nBased on the text above: {question}",
    "Context: {text}\n\nQ: {question}\nA:",
    "Use only this passage to answer. {text}\n\n{question}",
]

# --- held out: no topic and no template of it is above -------------------------------------------

HELD_OUT_TOPICS = """
restoring an old rowing boat|keeping a telescope in good order|planting a hedge|singing in a
small choir|learning to skate on ice|drying apples for the cold months|walking across a whole
county|mending a woollen jumper|watching the night sky from a roof|setting up a village fair|
sharing one car among neighbours|catching the early ferry to work
"""
HELD_OUT_ASKS = [
    "My sister has set her heart on {}. What should she hear before she goes ahead?",
    "Suppose that a whole street took up {}: what might change there within a year?",
    "I was told that {} calms the mind. Do you think so, and on what grounds?",
    "Draw up a fair way of splitting the work among four of us who take on {}.",
    "Which three mishaps does nobody see coming with {}, and what helps against them?",
    "Imagine an old hand talking, over soup, of {}. Let us hear that talk.",
]
HELD_OUT_CODE = [
    "I need a Python helper which tells how many working days lie between two dates. Go on.",
    "Give me a Rust snippet that pads every line of a file to the same width.",
    "Could you sketch, in plain C, a ring buffer for eight samples of type short?",
    "Show a Python generator yielding the rows of Pascal's triangle, one after the other.",
    "Set down a Perl one-liner that drops blank lines, and tell me why it does so.",
    "I want a Python class for a chess clock with two players and a pause.",
    "Produce Kotlin for a thermostat that switches with a gap of one degree.",
    "Let me see Python that turns a list of tags into a tree keyed by slashes.",
]
HELD_OUT_TEXTS = [
    "The ferry to the outer islands runs twice a day from October on. Tickets are sold on "
    "board, and bicycles travel free when there is space. In fog the second crossing may be "
    "dropped, which the skipper decides one hour ahead.",
    "Our allotment has thirty plots, of which four fell vacant in spring. Whoever wants one "
    "pays a deposit, digs it over by May and keeps the path in front clear. The pump is for "
    "everyone, and whoever leaves it running pays for the round at the autumn supper.",
    "Two brothers inherited a mill. The elder wanted to sell it, the younger to grind flour as "
    "their aunt had done. In the end a miller's widow leased it, and the brothers have had cake"
    " on Sundays ever since.",
    "Swifts sleep on the wing. They land only to breed, under roofs and in old walls, and come "
    "back to the same hole year after year. Where houses are done up in summer, a hole may be "
    "shut while the birds are in Africa.",
]
HELD_OUT_GIVEN = [
    "def late(days, fee=0.2):\n    due = 0\n    while days > 0:\n        due = due + fee\n"
    "        days = days - 1\n    return due",
    "struct Tank { double litres; };\ndouble pour(Tank& a, Tank& b, double x) {\n  a.litres -= x;\n"
    "  b.litres += x;\n  return b.litres;\n}",
]
HELD_OUT_GIVEN_ASKS = [
    "A colleague left me this. Say where it could go astray, and hand me a sturdier one:\n\n{}",
    "Walk me through the snippet here, then print it once more with tidier layout:\n\n{}",
    "Could the loop, or the arithmetic, in these lines be done without? Show how:\n\n{}",
    "Turn what you see here into something that a fourteen-year-old could follow:\n\n{}",
]
HELD_OUT_REWRITES = [
    "Put what follows into plainer words, yet leave out nothing:\n\n{}",
    "Hand back the lines here as though a grandmother had told them:\n\n{}",
    "Same facts, but please as a notice for the board in the hall:\n\n{}",
]
HELD_OUT_SUMMARIES = [
    "Boil this down to what somebody in a hurry must know:\n\n{}",
    "In a dozen words or so, what is being said here?\n\n{}",
]
HELD_OUT_QUESTIONS = [
    "Going by the lines here, what would you tell somebody who asks what it costs, or takes?\n\n{}",
    "Pick the one statement below that surprised you, and say what it rests on:\n\n{}",
]
